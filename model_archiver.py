"""TorchServe's import names of its archiver, for scripts and notebooks that call it as a library.

A module and not a package, so that no file of `torch-model-archiver` has its path: where that is
installed too, Python takes its folder `model_archiver/` first, and removing either leaves the other
whole. The modules below this name lie in `plugins/torchserve/archiver/shim/model_archiver`; see
`docs/decisions/README.md`.
"""

from pathlib import Path

import modelyard.plugins.torchserve.archiver as ours

__path__ = [str(Path(folder, "shim", "model_archiver")) for folder in ours.__path__]

from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive

__all__ = ["ModelArchiver", "ModelArchiverConfig", "generate_model_archive"]
