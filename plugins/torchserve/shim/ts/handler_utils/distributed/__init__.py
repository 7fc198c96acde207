"""Models that are spread over several processes."""
