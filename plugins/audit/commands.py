"""The subcommand; its code is loaded when it runs."""

from modelyard.base.plugins import Command

AUDIT = Command(
    "modelyard.plugins.audit.cli", "audit_app", "Check, show and export who changed what is served."
)
