"""A container for KServe: what its storage initializer leaves in a folder, served on one port."""
