"""The child process: one model version, loaded and run.

Nothing is imported here: `__main__.py` decides what is imported, and in which order.
"""
