"""The contracts of SageMaker's, Vertex AI's and Azure ML's inference containers."""

from pathlib import Path

SHIM = Path(__file__).parent / "shim"
"""Folder of the packages that files of SageMaker's users import."""
