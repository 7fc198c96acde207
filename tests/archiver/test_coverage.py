"""Which changes of a pipeline golden requests would notice, as `modelyard archive` says it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from modelyard.archiver.collect import ArchiveRequest, plan_archive
from modelyard.archiver.write import write_plan
from tests.handlers.test_text_handler import Mood, tokenizer_json

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits"
SCANS = DIGITS / "scans"


def coverage(folder: Path, request: ArchiveRequest) -> str:
    packed = write_plan(plan_archive(request), output_dir=folder / "store", dry_run=True)
    return packed.coverage


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a scan of another size than the model takes, from dark to light."""
    file = tmp_path / "large.png"
    Image.open(SCANS / "7.png").resize((20, 20), Image.Resampling.BICUBIC).save(file)
    return file


def digits(artifacts: dict[str, Path], examples: Sequence[str]) -> ArchiveRequest:
    return ArchiveRequest(
        "digits",
        artifact=artifacts["torchscript"],  # which needs no twin to be explained
        handler="image_classifier",
        extra_files=(DIGITS / "index_to_name.json",),
        config_file=DIGITS / "model-config.yaml",
        examples=tuple(examples),
    )


@pytest.mark.nightly  # by day test_replay.py reads it from the command
def test_what_no_example_notices_is_named_with_the_example_that_would(
    digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    assert coverage(tmp_path, digits(digits_artifacts, [f"{SCANS}/3.png=3"])) == (
        "golden coverage 5 of 6: none sees `resample` (add an example of another size than the "
        "model takes)"
    )


def test_with_that_example_everything_is_noticed(
    digits_artifacts: dict[str, Path], tmp_path: Path, large: Path
) -> None:
    examples = [f"{SCANS}/3.png=3", str(large)]
    assert coverage(tmp_path, digits(digits_artifacts, examples)) == "golden coverage 6 of 6"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("good", "golden coverage 2 of 4: none sees `truncation` (add an example of more than 16 "
                 "tokens); none sees `case` (add an example with capitals)"),
        pytest.param("Not " * 20 + "good", "golden coverage 4 of 4", marks=pytest.mark.nightly),
    ],
    ids=["short", "long"],
)  # fmt: skip
def test_texts_are_cut_off_and_turned_to_small_letters(
    tmp_path: Path, text: str, said: str
) -> None:
    example = (torch.randint(0, 10, (3, 5)), torch.ones(3, 5, dtype=torch.int64))
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", max=32)}
    model = Mood().eval().requires_grad_(False)
    torch.export.save(
        torch.export.export(model, example, dynamic_shapes=(dims, dims)), tmp_path / "mood.pt2"
    )
    files = {
        "index_to_name.json": json.dumps({"0": "bad", "1": "good"}),
        "tokenizer.json": tokenizer_json(),
        "model-config.yaml": "handler: {output_kind: logits, text: {max_length: 32}}",
        "text.txt": text,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    request = ArchiveRequest(
        "mood",
        artifact=tmp_path / "mood.pt2",
        handler="text",
        extra_files=(tmp_path / "index_to_name.json", tmp_path / "tokenizer.json"),
        config_file=tmp_path / "model-config.yaml",
        examples=(str(tmp_path / "text.txt"),),
    )
    assert coverage(tmp_path, request) == said
