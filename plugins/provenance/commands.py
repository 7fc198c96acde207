"""The subcommand; its code is loaded when it runs."""

from modelyard.base.plugins import Command

PROVENANCE = Command(
    "modelyard.plugins.provenance.cli",
    "provenance_app",
    "State what an archive was proven to do, for others to check.",
)
