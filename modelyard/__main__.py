"""Run the command as `python -m modelyard`."""

from modelyard.cli import main

main()
