"""The flags of `torchserve`, read by the command and once more by the server that it starts."""

import argparse
from collections.abc import Sequence

CommandLine = argparse.Namespace
"""Flags as attributes, `--ncs` as `no_config_snapshots`; None, or False, where one is not given."""


def parse_command_line(arguments: Sequence[str] | None = None) -> CommandLine:
    """Read the flags; wrong usage ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="torchserve",
        description="Serve models as TorchServe does. `modelyard serve` is this server's own "
        "command line.",
        epilog="Example: torchserve --start --ncs --model-store model_store "
        "--models digits=digits.mar",
    )
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("-v", "--version", action="store_true", help="print the version")
    verbs.add_argument("--start", action="store_true", help="start the server (the default)")
    verbs.add_argument("--stop", action="store_true", help="stop the server")
    for flags, text in _SWITCHES.items():
        parser.add_argument(*flags.split(), action="store_true", help=text)
    for flags, text in _VALUES.items():
        parser.add_argument(*flags.split(), help=text)
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME=LOCATION",
        help="what to load: [NAME=]LOCATION …, or ALL for the whole model store",
    )
    return parser.parse_args(arguments)


_SWITCHES = {
    "--foreground": "start: stay attached to the server; stop: say nothing when it has ended",
    "--no-config-snapshots --ncs": "neither write snapshots nor restore the newest one",
    "--disable-token-auth --dt": "let everybody in who reaches the ports",
    "--enable-model-api": "let models be registered and unregistered while serving",
}
_VALUES = {
    "--model-store": "folder of the archives that may be served",
    "--workflow-store": "accepted; workflows are not served",
    "--ts-config": "configuration file; default: config.properties, where there is one",
    "--log-config": "log4j 2's XML: levels, appenders, patterns and rotation are followed",
    "--cpp-log-config": "accepted; there is no C++ backend",
    "--plugins-path --ppath": "accepted; Java plug-ins have no effect",
}
