"""The subcommands; their code is loaded when they run."""

from modelyard.base.plugins import Command

INCIDENT = Command(
    "modelyard.plugins.incidents.cli", "incident_app", "Write how an answer came about to a file."
)
REPLAY = Command(
    "modelyard.plugins.incidents.cli",
    "replay_app",
    "Run the batch of such a file again, and compare the answers.",
)
