"""Subcommands for those who come from TorchServe; the code is loaded when one runs."""

from modelyard.base.plugins import Command

MIGRATE = Command(
    "modelyard.plugins.torchserve.migrate.cli",
    "migrate_app",
    "Say what becomes of a TorchServe installation.",
)
