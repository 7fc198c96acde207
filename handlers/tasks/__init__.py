"""Handlers of pictures, texts and tables."""
