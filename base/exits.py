"""How a process ended, for people."""

import signal


def describe_exit(code: int) -> str:
    """Return an exit code in words; negative ones are signals."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
