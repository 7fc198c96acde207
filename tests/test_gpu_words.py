"""Whoever reads of CUDA also reads that it is not measured, or where it was seen."""

import re
from pathlib import Path

import pytest

from tests import seen_on

REPO = Path(__file__).resolve().parents[1]
PAGES = [
    *REPO.glob("*.md"),
    *(page for page in (REPO / "docs").glob("*.md") if page.stem not in ("seen-on", "api")),
    *(REPO / "plugins").glob("*/README.md"),
    REPO / "deploy" / "compose.yaml",
]
"""Not decision records, which are dated, and not the reference, which quotes the code."""
SPEAKS = re.compile(r"\b(CUDA|GPUs?|TensorRT|cuDNN|nvidia-smi|NVIDIA)\b", re.IGNORECASE)
TELLS = re.compile(r"not (been )?measured|seen-on\.md", re.IGNORECASE)
HARMLESS = re.compile(
    r"builds? for CUDA( with NVIDIA's libraries)?|\bfor CUDA (alone|only)|TensorRT-LLM"
    r"|\b(no|without an?) (CUDA device|GPU)|^#+ .*$|\[[^]\n]*\]\([^)\n]*\)"
    r"|`gpu`, `network`|`nvidia-\*`",
    re.IGNORECASE | re.MULTILINE,
)
"""What a package is called, that there is no device, a heading, a link, and names of others."""


def silent(text: str) -> list[str]:
    """Return the paragraphs, tables and lists that speak of CUDA and do not say what was seen."""
    shown = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [
        part.strip()
        for part in re.split(r"\n\s*\n", shown)
        if SPEAKS.search(HARMLESS.sub("", part)) and not TELLS.search(part)
    ]


@pytest.mark.parametrize(
    ("text", "is_caught"),
    [
        ("It runs on CUDA.", True),
        ("Twice as fast on a GPU as on a CPU.", True),
        ("| `gpus` | what a worker takes of a GPU |", True),
        ("On a\nGPU it is fast.\n\nIt is not measured.", True),
        ("* TensorRT takes it.\n* Nothing else does.", True),
        ("Without a GPU it is slow; with a GPU it is not.", True),
        ("It runs on CUDA, which is not measured.", False),
        ("On a GPU ([seen](seen-on.md)) it\nis fast.", False),
        ("pip takes the build for CUDA.", False),
        ("It runs on machines without a GPU too.", False),
        ("| `--device` | `cpu` or `cuda`: the artifact runs on either |", True),
        ("```sh\nmodelyard serve start --device cuda\n```", False),
        ("Figures of a CPU.", False),
    ],
)
def test_a_sentence_that_claims_is_caught_and_a_harmless_one_is_not(
    text: str, is_caught: bool
) -> None:
    assert bool(silent(text)) is is_caught


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_a_page_says_of_cuda_what_was_seen(page: Path) -> None:
    assert silent(page.read_text()) == []


def test_what_was_seen_is_written_by_a_run_on_a_device() -> None:
    assert seen_on.is_recorded(seen_on.PAGE.read_text())
    page = seen_on.render({"device": "A card"}, {"`test_a`": "passed", "`test_b`": "failed"})
    assert "| device | A card |" in page
    assert "| `test_b` | failed |" in page
    assert seen_on.is_recorded(page)
    assert not seen_on.is_recorded(page.replace("failed", "passed"))
    assert not seen_on.is_recorded(seen_on.NOTHING.replace("Nothing", "All"))
