"""TorchServe's handlers, under their old names."""
