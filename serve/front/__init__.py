"""The front of a server: where every request begins, and the seam of those that translate them."""
