"""Subcommands of the operator's; each names where its code lies, which is loaded when it runs."""

from modelyard.base.plugins import Command

PLAN = Command(
    "modelyard.plugins.ops.tune.plan_cli",
    "plan_app",
    "Say how many cells a load needs, and try one.",
)
ROLLOUT = Command(
    "modelyard.plugins.ops.rollout.cli",
    "rollout_app",
    "Compare a new version with the one that answers, and let it answer step by step.",
)
TUNE = Command(
    "modelyard.plugins.ops.tune.tune_cli",
    "tune_app",
    "Find a model's best settings on this machine.",
)
