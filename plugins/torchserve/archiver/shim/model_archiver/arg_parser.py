"""TorchServe's parser of its archiver's command line."""

from modelyard.plugins.torchserve.archiver.cli import parse_command_line

from .model_archiver_config import ModelArchiverConfig


class ArgParser:
    """A namespace for one function."""

    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """Return what the command line asks for; wrong usage ends the program."""
        return parse_command_line()
