"""TorchServe's import names of its archiver, for scripts and notebooks that call it as a library.

On the path only of programs that ask for it: see `docs/decisions/0016-model-archiver-names.md`.
"""

from .model_archiver import ModelArchiver
from .model_archiver_config import ModelArchiverConfig
from .model_packaging import generate_model_archive

__all__ = ["ModelArchiver", "ModelArchiverConfig", "generate_model_archive"]
