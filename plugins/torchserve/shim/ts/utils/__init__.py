"""TorchServe's helpers, as far as handlers import them."""
