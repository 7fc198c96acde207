"""YAML → values, with the place of what is wrong."""

from typing import Any


def parse_yaml(data: bytes | str) -> Any:
    """Parse YAML in UTF-8.

    Raises:
        ValueError: it is not YAML, or nested too deep; the message is a phrase without a file's
            name.
    """
    import yaml

    try:
        return yaml.safe_load(data if isinstance(data, str) else data.decode("utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
