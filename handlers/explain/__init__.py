"""Explanations: options, methods, attributions and their error, quality, pictures."""
