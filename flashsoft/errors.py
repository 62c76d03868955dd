"""Exception types beyond `ValueError` and `TypeError`, which name a wrong argument."""


class BackendUnavailableError(RuntimeError):
    """No backend, or not the one asked for by name, can run this problem; the message says why."""
