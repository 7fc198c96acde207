"""For authors' unit tests of their handlers."""
