"""Further attribution methods, and measures of how good an explanation is."""
