"""A new version beside the one that answers: compared, given a share, made the default, or not."""
