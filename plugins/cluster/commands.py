"""Subcommands of servers beyond one machine; the code is loaded when one runs."""

from modelyard.base.plugins import Command

KSERVE = Command(
    "modelyard.plugins.cluster.kserve.cli",
    "kserve_app",
    "Serve a folder as a container of KServe's.",
)
DOCKERIZE = Command(
    "modelyard.plugins.cluster.dockerize_cli",
    "dockerize_app",
    "Write a folder that builds a container image with archives inside.",
)
