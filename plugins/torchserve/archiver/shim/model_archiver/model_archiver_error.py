"""The error that callers of TorchServe's archiver catch: ours, with our messages."""

from modelyard.archiver.errors import ArchiveError as ModelArchiverError

__all__ = ["ModelArchiverError"]
