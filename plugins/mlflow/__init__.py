"""MLflow: models from its tracking server, its deployments, and its scoring protocol."""
