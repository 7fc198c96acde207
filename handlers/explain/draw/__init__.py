"""Explanations as pictures and pages."""
