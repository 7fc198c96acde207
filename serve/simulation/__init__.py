"""A set of cells on a clock of its own: the server's own admission, batching and picking."""
