"""Subcommands about where servers run; the code is loaded when one runs."""

from modelyard.base.plugins import Command

DOCTOR = Command(
    "modelyard.plugins.cluster.doctor.cli", "doctor_app", "Report what works here, and what to do."
)
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
