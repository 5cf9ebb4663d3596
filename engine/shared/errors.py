"""The error for a model that cannot be served."""

EXIT_CANNOT_LOAD = 2
"""Exit code of a process that has said why it cannot load the model."""


class ModelError(Exception):
    """The model cannot be served; the message is one line that names the fault."""
