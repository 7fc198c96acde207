"""The help of every command, as a user at 80 columns sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from modelyard.cli import commands, main

PATHS = [[name] for name in commands()] + [
    ["serve", "start"],
    ["token", "new"],
    ["models", "scale"],
]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_no_flag_looks_as_if_it_took_a_value(
    path: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*path, "--help"])
    text = capsys.readouterr().out
    assert "Usage:" in text and "--help" in text
    assert "<bool>" not in text
    undescribed = re.findall(r"│.* <[^>]+> +(?:\[required\] +)?│", text.partition(" Options ")[0])
    assert undescribed == []


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_what_a_command_takes_is_in_capitals_and_sentences_break_at_the_terminals_end(
    path: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([*path, "-h"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    usage = text.partition("Usage:")[2].splitlines()[0]
    assert not re.search(r"[{\[][a-z_]+[}\]]", usage), usage
    prose = [line.strip() for line in text.partition("╭")[0].splitlines()]
    broken = [line for line in prose if 70 < len(line) < 110 and not line.endswith((".", ":"))]
    assert [line for line in broken if "modelyard " not in line] == []


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [
        ("bash", "modelyard pre", "predict"),
        ("bash", "modelyard serve sta", "start\nstatus"),
        ("bash", "modelyard archive --archive-format zip", "zip-store"),
        ("zsh", "modelyard serve sto", '"stop":'),
        ("fish", "modelyard export --quan", "--quantize"),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    shell: str, line: str, expected: str
) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    others = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "modelyard"],
        env={**os.environ, **(words if shell == "bash" else others),
             "_MODELYARD_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert expected in ran.stdout
