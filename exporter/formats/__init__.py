"""Artifact formats: a program → a file of one format, and a file → a program."""
