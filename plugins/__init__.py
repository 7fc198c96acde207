"""What core can do without: each folder registers itself by entry points."""
