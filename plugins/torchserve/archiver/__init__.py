"""`torch-model-archiver`: TorchServe's archiver, with its flags, messages and archives."""
