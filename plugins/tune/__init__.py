"""Settings for an objective on this machine, and cells for a load."""
