"""The arguments of TorchServe's archiver as a value."""

from modelyard.plugins.torchserve.archiver.archive import ModelArchiverConfig as ModelArchiverConfig
