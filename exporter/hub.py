"""`hf://owner/name@revision` → a folder of safetensors and JSON: one commit of a model hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelyard.base.extras import how_to_install
from modelyard.exporter.errors import CheckpointError, ModelError
from modelyard.exporter.sources import Fetched, Tell

MOST_BYTES = 256 << 30
"""Size of all files that are taken from one repository."""
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model")
"""Weights that hold tensors alone, and what configures a model or tokenizer: neither pickles nor
code."""
# A Path has one slash where the text had two.
_LOCATION = re.compile(r"hf:/{1,2}(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@contextmanager
def fetch(location: str, tell: Tell) -> Iterator[Fetched]:
    """Fetch a repository's weights and configuration.

    The hub is `HF_ENDPOINT`'s, the folder lies in the cache of huggingface_hub, whose own settings
    hold. The folder goes by the commit.

    Args:
        tell: called with the commit that a revision is.

    Raises:
        CheckpointError: there is none, or it has no safetensors.
        ModelError: huggingface_hub is not installed.
    """
    named = _LOCATION.fullmatch(location)
    if named is None:
        raise CheckpointError(f'"{location}": expected hf://OWNER/NAME@REVISION')
    repository, revision = named["repository"], named["revision"] or "main"
    text = f"hf://{repository}@{revision}"
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise ModelError(how_to_install(error) or str(error)) from error
    try:
        about = HfApi().model_info(repository, revision=revision, files_metadata=True)
        files = {each.rfilename: each.size or 0 for each in about.siblings or ()}
        if not any(name.endswith(".safetensors") for name in files):
            raise CheckpointError(
                f'"{text}" has no safetensors, of {len(files)} files; other weights are not taken '
                "from a hub: download it, look at it with `modelyard inspect`, export the folder"
            )
        if sum(files.values()) > MOST_BYTES:
            raise CheckpointError(f'"{text}" has more than {MOST_BYTES} bytes; export a folder')
        folder = snapshot_download(repository, revision=about.sha, allow_patterns=[*WANTED])
    except CheckpointError:
        raise
    except Exception as error:  # of whatever kind the hub's library has
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f'"{text}" cannot be fetched: {type(error).__name__}: {reason}'
        ) from error
    if tell is not None and about.sha != revision:
        tell(f"{text} is commit {about.sha}")
    exact = {"location": f"hf://{repository}@{about.sha}"}
    yield Fetched(Path(folder), repository.partition("/")[2], exact)
