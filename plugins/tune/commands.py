"""Subcommands of the tuner; each names where its code lies, which is loaded when it runs."""

from modelyard.base.plugins import Command

PLAN = Command(
    "modelyard.plugins.tune.plan_cli",
    "plan_app",
    "Say how many cells a load needs, and try one.",
)
TUNE = Command(
    "modelyard.plugins.tune.tune_cli",
    "tune_app",
    "Find a model's best settings on this machine.",
)
