"""Tables that lie beside the code as YAML, where a person can read and change them."""

import functools
from importlib.resources import files
from typing import Any

import yaml


@functools.cache
def read_table(package: str, name: str) -> Any:
    """Return the content of `<name>.yaml` of a package."""
    return yaml.safe_load(files(package).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
