"""Subcommands of the operator's; each names where its code lies, which is loaded when it runs."""

from modelyard.base.plugins import Command

ROLLOUT = Command(
    "modelyard.plugins.ops.rollout.cli",
    "rollout_app",
    "Compare a new version with the one that answers, and let it answer step by step.",
)
DIFF = Command("modelyard.plugins.ops.diff_cli", "diff_app", "Compare the answers of two archives.")
