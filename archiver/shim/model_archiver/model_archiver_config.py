"""The arguments of TorchServe's archiver as a value."""

from modelyard.archiver.torchserve.archive import ModelArchiverConfig as ModelArchiverConfig
