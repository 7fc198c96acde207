"""How an answer came about, in a file: what led to it, and the same batch run again."""
