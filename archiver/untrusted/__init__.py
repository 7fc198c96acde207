"""The one reader of strangers' files: JSON, zip, tar, folders and the names inside them."""
