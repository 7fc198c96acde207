"""What an archive takes along from a checkpoint's folder: Hugging Face's JSON files, as they are.

`config.json` names the labels and says what kind of problem the model solves;
`preprocessor_config.json`, or `processor_config.json` of newer folders, says how pictures or sounds
become inputs. Everything that a handler reads of them can be said in model-config.yaml instead,
which comes first.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.archiver import handler_files
from modelyard.archiver.labels import parse_labels
from modelyard.archiver.reference import Reference, parse_reference
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.handlers.errors import LoadError

PROCESSOR_PARTS = ("image_processor", "feature_extractor")
"""Keys under which newer folders keep what was a file of its own."""


def read_json_file(path: Path) -> Any:
    """Read a JSON file of the archive; None where there is none.

    Raises:
        LoadError: it is not JSON, or too long.
    """
    if not path.is_file():
        return None
    try:
        return parse_json(path.read_bytes(), handler_files.MAX_JSON_BYTES)
    except ValueError as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error


def read_reference(folder: Path) -> Reference | None:
    """Return the shares that live ones are compared with; None where the archive has none.

    Raises:
        LoadError: it is none.
    """
    file = folder / REFERENCE_NAME
    if not file.is_file():
        return None
    try:
        return parse_reference(file.read_bytes())
    except ValueError as error:
        raise LoadError(f"{REFERENCE_NAME} is wrong: {error}; build the archive again") from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return `config.json`; empty where the archive has none, or one of something else."""
    content = read_json_file(folder / handler_files.CONFIG_FILE)
    return content if isinstance(content, dict) else {}


def read_processor(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and content of the file that says how inputs are made; None without one."""
    for name in handler_files.PROCESSOR_FILES:
        content = read_json_file(folder / name)
        if isinstance(content, dict):
            parts = (
                content[part] for part in PROCESSOR_PARTS if isinstance(content.get(part), dict)
            )
            return name, next(parts, content)
    return None


def load_label_mapping(folder: Path) -> dict[str, str] | None:
    """Read the labels: output index as str → label; None where no file says them.

    They are in `index_to_name.json`; without it they are `id2label` of `config.json`.
    """
    file = folder / handler_files.LABELS_FILE
    if file.is_file():
        try:
            return parse_labels(file.read_bytes())
        except ValueError as error:
            raise LoadError(str(error)) from error
    content = read_config(folder).get("id2label")
    if content is None:
        return None
    if not isinstance(content, dict):
        raise LoadError(
            f"{handler_files.CONFIG_FILE} holds a {type(content).__name__} of labels; expected an "
            'object like {"0": "cat"}'
        )
    return {str(key): str(label) for key, label in content.items()}
