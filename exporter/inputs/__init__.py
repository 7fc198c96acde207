"""Which inputs a model takes: proposed, tried, settled, their ranges and samples."""
