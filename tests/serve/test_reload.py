"""Edits of a handler, served by a real server as they are saved."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.write import overlay, own_files
from modelyard.serve.errors import StartError
from modelyard.serve.settings import load_settings
from tests.serve.live import environment, poll, start_arguments

HANDLER = """
import helper


def handle(data, context):
    return [helper.say(row["body"]) for row in data or []]
"""
GOOD = "def say(text):\n    return text.upper()\n"


class Edited:
    """A server that stays attached, and the folder whose edits it serves."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "handler.py").write_text(HANDLER)
        (self.source / "helper.py").write_text(GOOD)
        (self.source / "hello.txt").write_text("hello")
        write_archive(
            "shout",
            version="1.0",
            handler=str(self.source / "handler.py"),
            extra_files=[self.source / "helper.py"],
            examples=[f"{self.source}/hello.txt=HELLO"],
            output_dir=folder / "store",
        )
        # A request that was answered before an edit is answered anew after it.
        (config := folder / "config.yaml").write_text(
            "model_settings: {shout: {cacheAnswers: true}}\n"
        )
        command = start_arguments(folder / "state", folder / "store")
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "modelyard", *command, "--models=shout",
                 "--workers=1", f"--reload={self.source}", f"--config={config}"],
                stdout=output,
                stderr=output,
                env=environment(),
            )  # fmt: skip
        found = poll(lambda: re.search(r"^inference +(http\S+)", self.said, re.M), "ready", 60)
        poll(lambda: "are served" in self.said, "it watches")
        self.client = httpx.Client(base_url=found[1], timeout=60, verify=False)

    @property
    def said(self) -> str:
        """What the command printed."""
        return self.output.read_text()

    def ask(self) -> str:
        """Return the answer to a request that no golden one is, to a version by its name."""
        answer = self.client.post(
            "/predictions/shout/1.0", content=b"hi", headers={"Content-Type": "text/plain"}
        )
        assert answer.status_code == 200, answer.text
        return answer.text

    def save(self, text: str, expected: str) -> None:
        """Write the helper anew, and wait until the terminal says what became of it."""
        before = self.said.count(expected)
        (self.source / "helper.py").write_text(text)
        poll(lambda: self.said.count(expected) > before, expected)

    def stop(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        assert "Traceback" not in self.said


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Edited]:
    server = Edited(tmp_path)
    try:
        yield server
        server.stop()
    finally:
        server.process.kill()


def test_an_edit_is_served_when_it_is_saved_and_a_broken_one_is_shown(edited: Edited) -> None:
    assert edited.ask() == "HI"
    edited.save(GOOD.replace("()", "("), "helper.py: SyntaxError: '(' was never closed")
    edited.save(
        GOOD.replace("text.", "txet."),
        "got status 500: NameError: name 'txet' is not defined (helper.py:2)\n",
    )
    edited.save(GOOD.replace("upper", "lower"), 'expected the label "HELLO", got "hello"')
    assert edited.ask() == "HI"
    edited.save(GOOD.replace("upper()", "upper()[:5] + '!' * (len(text) < 3)"), "serves helper.py")
    assert edited.ask() == "HI!"
    edited.save(GOOD, "serves helper.py")
    assert edited.ask() == "HI"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """An archive of one handler, unpacked."""
    (tmp_path / "handler.py").write_text(HANDLER)
    file = write_archive(
        "shout", version="1.0", handler=str(tmp_path / "handler.py"), output_dir=tmp_path
    )
    with open_archive(file) as archive:
        archive.unpack(tmp_path / "unpacked")
    return tmp_path / "unpacked"


def test_an_archive_with_another_file_is_whole_again(unpacked: Path, tmp_path: Path) -> None:
    assert list(own_files(unpacked)) == ["handler.py"]
    (tmp_path / "new.py").write_text("handle = print\n")
    overlay(unpacked, {"handler.py": tmp_path / "new.py"}, tmp_path / "edited")
    with open_archive(tmp_path / "edited") as archive:  # which compares every digest
        assert archive.read("handler.py") == b"handle = print\n"
        assert archive.manifest.model_name == "shout"
    with pytest.raises((ArchiveError, OSError)):
        overlay(unpacked, {"handler.py": tmp_path / "gone.py"}, tmp_path / "other")


def test_what_cannot_be_watched_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"reload\.0: there is no folder /.*/none"):
        load_settings({"reload": [tmp_path / "none"]}, None, {})
    signed = {"trusted_keys": "keys", "require_signature": "1", "reload": [tmp_path]}
    with pytest.raises(StartError, match="what is edited is not signed"):
        load_settings(signed, None, {})
