"""The proof: what a checkpoint gives, what an artifact gives, and whether the two agree."""
