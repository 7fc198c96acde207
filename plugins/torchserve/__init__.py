"""TorchServe's command, configuration and HTTP, spoken by the same server."""

TORCHSERVE_VERSION = "0.12.0"
"""The TorchServe whose behaviour this is; clients and scripts compare it."""
NO_WORKFLOWS = "workflows are not served by Modelyard"
