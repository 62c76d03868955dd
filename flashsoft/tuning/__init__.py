"""Launch configurations as data: frozen dataclasses, what is legal, and what is chosen for a problem."""
