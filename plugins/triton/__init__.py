"""Triton's extensions of the Open Inference Protocol: what its clients and tools ask beside it."""
