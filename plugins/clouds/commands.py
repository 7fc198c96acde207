"""Subcommands for those who come from a cloud's containers; the code is loaded when one runs."""

from modelyard.base.plugins import Command

_CLI = "modelyard.plugins.clouds.cli"
SAGEMAKER = Command(_CLI, "sagemaker_app", "Serve a model folder as SageMaker's containers do.")
VERTEX = Command(_CLI, "vertex_app", "Serve a model folder as Vertex AI asks for it.")
AZUREML = Command(_CLI, "azureml_app", "Serve a score.py as Azure ML's containers do.")
