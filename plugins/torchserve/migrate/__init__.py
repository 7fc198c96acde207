"""`modelyard migrate`: what becomes of a TorchServe installation, before it moves."""
