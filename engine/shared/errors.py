"""Why a model folder cannot be served."""


class ModelError(Exception):
    """The model folder cannot be served; the message is one line that names the fault."""
