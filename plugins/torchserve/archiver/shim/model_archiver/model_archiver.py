"""TorchServe's class that is called to write an archive."""

from .model_archiver_config import ModelArchiverConfig
from .model_packaging import write


class ModelArchiver:
    """A namespace for one function."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Write the archive that `config` describes.

        Raises:
            ModelArchiverError: it cannot be written.
            FileNotFoundError: a file is not there.
        """
        write(config)
