"""The error that callers of TorchServe's archiver catch."""


class ModelArchiverError(Exception):
    """Raise when an archive cannot be written."""
