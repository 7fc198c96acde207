"""Callbacks that export a checkpoint when a trainer has saved it, of Lightning and transformers."""
