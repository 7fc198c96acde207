"""TorchServe's name for the manifest's parts."""
