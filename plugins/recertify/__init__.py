"""Whether archives answer the same on other versions and other runtimes, said beforehand."""
