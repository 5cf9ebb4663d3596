"""The error for a model that cannot be served."""


class ModelError(Exception):
    """The model cannot be served; the message is one line that names the fault."""
