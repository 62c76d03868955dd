"""Other libraries call flashsoft through these. Each is imported, and then registered, only when asked for."""
