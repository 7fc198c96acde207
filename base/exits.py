"""How a process ended, for people."""

import signal


def describe_exit(code: int) -> str:
    """Return an exit code in words; negative ones are signals."""
    names = {-number: number.name for number in signal.Signals}  # few real-time ones are there
    return f"signal {names.get(code, -code)}" if code < 0 else f"exit code {code}"
