"""What others check of an archive: a signed statement of its parity, and its SPDX document."""
