"""Imported with the first request, as many handlers do."""

NAME = "author's late"
