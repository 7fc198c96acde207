"""Handlers of further tasks: generation, sound, series, detection, segmentation."""
