"""TorchServe's command, configuration and HTTP, spoken by the same server."""
