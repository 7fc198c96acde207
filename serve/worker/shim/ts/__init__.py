"""TorchServe's import names, for handlers written for it; on the path of workers only."""
