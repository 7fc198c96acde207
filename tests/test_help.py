"""The help of every command, as a user at 80 columns sees it."""

from __future__ import annotations

import re

import pytest

from modelyard.cli import COMMANDS, main

PATHS = [[name] for name in COMMANDS] + [["serve", "start"], ["token", "new"], ["models", "scale"]]


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
