"""Artifacts that can be called: backends, weights that are shared, rows of a batch."""
