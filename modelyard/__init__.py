"""Export PyTorch checkpoints, archive them with their handlers, serve predictions and explanations.

The five packages are folders at the top of the repository and links in this one: an archive, or a
project that runs a command here, may have its own `serve.py`, `handlers.py` or `exporter/`, and the
names never meet. Importing this package imports none of them.
"""
