"""Base classes of handlers whose model is spread over several processes."""
