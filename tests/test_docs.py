"""The README and the pages of docs/: every command runs, every table is complete, links lead on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.core import TyperGroup

from modelyard.archiver.untrusted.names import builtin_handlers
from modelyard.base.explain_options import EXPLAIN_OPTIONS
from modelyard.base.plugins import registered
from modelyard.cli import commands as subcommands
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.request.options import ExplainOptions
from modelyard.serve import errors
from modelyard.serve.dataplane.metrics import Family
from modelyard.serve.settings import Settings
from tests import neighbours
from tests.serve.collectors import all_metrics
from tests.shared import EXPORT

REPO = Path(__file__).parent.parent
PAGES = sorted((REPO / "docs").rglob("*.md"))
PORTS = {
    "8080": "MODELYARD_PORT",
    "8081": "MODELYARD_MANAGEMENT_PORT",
    "8082": "MODELYARD_METRICS_PORT",
}
GRPC_PORTS = ("7070", "7071")
"""Of `config.properties`."""
DAILY = ("CONTRIBUTING", "breadth")
"""Pages whose commands run beside the README's in `make test`; the others' in `make nightly`."""
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the docs' commands use curl")


class Block(NamedTuple):
    """One ```sh block; `sh fails` says that its last command is meant to fail."""

    place: str
    commands: str
    fails: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in re.finditer(r"^```sh( fails)?\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(f"{page.name}:{line}", match[2], match[1] is not None))
    return found


def without_shared_export(commands: str) -> str:
    """Return commands without the export whose artifacts are there."""
    shared = ["modelyard", *EXPORT, "-o", "build"]

    def left(match: re.Match[str]) -> str:
        return "" if shlex.split(match[0].replace("\\\n", " ")) == shared else match[0]

    return re.sub(r"^modelyard export (?:.*\\\n)*.*\n", left, commands, flags=re.M)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has who asks for any: those are given out from 32768 on."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return [*ports]


class Yard:
    """A reader's checkout: what the commands need, the default ports replaced by free ones.

    The reader has files of our packages' names there, and the folder on the path. The README's
    export has run already: its artifacts are those that the whole test run shares.
    """

    def __init__(self, folder: Path, home: Path, artifacts: Mapping[str, Path]) -> None:
        self.folder = folder
        (folder / "build").mkdir()
        for format in ("pt2", "onnx"):  # without --format
            for file in (artifacts[format], Path(f"{artifacts[format]}.report.json")):
                shutil.copy(file, folder / "build")
        shutil.copytree(REPO / "examples", folder / "examples")
        shutil.copy(REPO / "Makefile", folder)
        neighbours.write_neighbours(folder)
        (folder / ".venv").symlink_to(sys.prefix)
        (home / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
        self.ports = dict(zip((*PORTS, *GRPC_PORTS), map(str, free_ports(5)), strict=True))
        self.environment = {
            **os.environ,
            **neighbours.ENVIRONMENT,
            **{variable: self.ports[port] for port, variable in PORTS.items()},
            "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "XDG_STATE_HOME": str(home),
            "CURL_HOME": str(home),
            "MODELYARD_WORKERS": "1",
            "MAKEFLAGS": "n",  # `make test` must exist, and not run these tests again
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(home),  # TorchServe's pid file lies there, one server per folder
        }

    def run(self, page: Path) -> None:
        """Run a page's blocks, each in a shell of its own as a reader pastes them."""
        for block in blocks(page):
            commands = re.sub(
                r"(?<=127\.0\.0\.1:)(?:808[012]|707[01])|(?<=_port=)707[01]",
                lambda match: self.ports[match[0]],
                without_shared_export(block.commands),
            )
            done = self.shell(commands)
            assert (done.returncode != 0) == block.fails, (
                f"{block.place}: exit code {done.returncode}\n{commands}\n{done.stdout}"
            )

    def shell(self, commands: str) -> subprocess.CompletedProcess[str]:
        # Not a pipe, which `torchserve` goes on writing to after it has returned.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=300,
            )
            output.seek(0)
            done.stdout = output.read()
            return done


@pytest.fixture(scope="module")
def yard(
    tmp_path_factory: pytest.TempPathFactory, digits_artifacts: dict[str, Path]
) -> Iterator[Yard]:
    """Yield a folder in which the README's commands have been run."""
    folder, home = tmp_path_factory.mktemp("yard"), tmp_path_factory.mktemp("home")
    made = Yard(folder, home, digits_artifacts)
    try:
        made.run(REPO / "README.md")
        yield made
    finally:
        made.shell("modelyard serve stop")


def test_the_readmes_export_is_the_one_that_the_test_run_shares() -> None:
    readme = "".join(block.commands for block in blocks(REPO / "README.md"))
    assert readme.count("modelyard export ") == 1
    assert "modelyard export " not in without_shared_export(readme)
    assert "modelyard export " in without_shared_export(readme.replace("image:", "scan:"))


@needs_curl
def test_the_readme_leaves_an_archive_and_a_heat_map_and_no_server(yard: Yard) -> None:
    assert (yard.folder / "model_store" / "digits.mar").is_file()
    assert (yard.folder / "build" / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert yard.shell("modelyard serve status").stdout == "no server is running\n"


@needs_curl
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.stem, marks=[pytest.mark.nightly] if page.stem not in DAILY else []
        )
        for page in (REPO / "CONTRIBUTING.md", *PAGES)
        if blocks(page)
    ],
)
def test_every_command_of_a_page_runs_and_no_server_is_left(page: Path, yard: Yard) -> None:
    try:
        yard.run(page)
        assert yard.shell("modelyard serve status").stdout == "no server is running\n"
    finally:
        yard.shell("modelyard serve stop; torchserve --stop")


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command, those within others too."""
    without_files = re.sub(r"<<'END'\n.*?^END$", "", block.commands, flags=re.M | re.S)
    for line in without_files.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
            for inner in re.findall(r"\$\(([^()]*)\)|^trap '(.*?)'", line):
                yield shlex.split("".join(inner))


def test_a_page_that_starts_a_server_stops_it() -> None:
    for page in (*REPO.glob("*.md"), *PAGES):
        runs = False
        for block in blocks(page):
            for words in commands(block):
                words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
                if words[:2] in (["modelyard", "serve"], ["torchserve", "--start"]):
                    starts = {"start", "--start"} & set(words)
                    runs = bool(starts and "--explain-plan" not in words) or (
                        runs and "stop" not in words
                    )
                elif words[:2] == ["torchserve", "--stop"]:
                    runs = False
        assert not runs, f"{page.name} leaves a server behind"


def check_words(program: str, words: list[str]) -> None:
    """Raise where `make` or `modelyard` has no such command or option."""
    if program == "make":
        assert re.search(rf"^{words[0]}:", (REPO / "Makefile").read_text(), re.M), words
        return
    about = subcommands()[words[0]]
    command = typer.main.get_command(getattr(importlib.import_module(about.module), about.app))
    rest = words[1:]
    while isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    command.make_parser(command.context_class(command)).parse_args(rest)


@pytest.mark.parametrize(
    "page",
    [page for page in (*REPO.glob("*.md"), *PAGES) if blocks(page)],
    ids=lambda page: page.stem,
)
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    """So that a page is looked at also where its commands run at night only."""
    checked = 0
    for block in blocks(page):
        for program, *words in commands(block):
            for word in words:
                for file in re.findall(r"^(?:[^/]*=)?@?(examples/[^:=@]*)", word):
                    assert (REPO / file).exists(), f"{block.place}: {word}"
            if program in ("make", "modelyard"):
                check_words(program, words)
                checked += 1
    assert checked


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("modelyard sevre start", "sevre"),
        ("modelyard serve begin", "begin"),
        ("modelyard export net.pt --modle net.py:Net", "--modle"),
        ("make tests", "tests"),
    ],
)
def test_a_command_that_is_not_there_is_found(line: str, named: str) -> None:
    program, *words = line.split()
    with pytest.raises(Exception, match=named):
        check_words(program, words)


def rows(page: str, heading: str, marks: bool = False) -> list[list[str]]:
    """Return the cells of the first table below a heading; marks of code only where asked for."""
    text = f"\n{(REPO / 'docs' / page).read_text()}".split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(^\|.*\n)+", text, re.M)
    assert table is not None
    lines = (table[0] if marks else table[0].replace("`", "")).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_settings_table_names_every_setting_and_its_default() -> None:
    documented = {name: default for name, default, _ in rows("settings.md", "# Settings")}
    defaults = {
        name: ",".join(map(str, value)) or "none"
        if isinstance(value, tuple)
        else str(int(value) if isinstance(value, float | bool) else value)
        for name, field in Settings.model_fields.items()
        if (value := field.default) is not None
        and name not in ("cache_dir", "state_dir", "model_settings")
    }
    # What TorchServe's configuration sets is described with that command.
    assert documented.keys() == Settings.model_fields.keys() - {"torchserve"}
    assert {name: documented[name] for name in defaults} == defaults


def test_the_errors_table_names_every_status_and_type() -> None:
    documented = {(int(status), kind) for status, kind, *_ in rows("http.md", "## Errors")}
    declared = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind.answer for kind in declared if issubclass(kind, errors.ServeError)} <= documented


def test_the_metrics_table_names_every_metric_with_its_labels() -> None:
    def exposed(metric: Family) -> str:
        return metric.name + ("_total" if metric.kind == "counter" else "")

    documented = {row[0]: (row[1], row[2].split()) for row in rows("metrics.md", "# Metrics")}
    expected = {
        exposed(family): (family.kind, list(family.labels))
        for family in all_metrics()
        if family.labels
    }
    assert expected.items() <= documented.items()
    if registered("observers"):  # whose metrics are among these
        assert documented == expected


def test_the_options_table_names_every_option_of_an_explanation() -> None:
    documented = {row[0] for row in rows("explain.md", "## Options")}
    options = {field.name for field in dataclasses.fields(ExplainOptions)} - {"given"}
    assert documented == options
    assert EXPLAIN_OPTIONS.keys() == options


def test_a_body_is_shown_for_every_built_in_handler_and_is_json() -> None:
    table = rows("calling.md", "## Bodies for every built-in handler", marks=True)
    assert {handler.strip("`") for handler, *_ in table} >= set(builtin_handlers())
    bodies = [body for _, text, _ in table for body in re.findall(r"`([\[{\"].*?)`", text)]
    assert len(bodies) > 12
    for body in bodies:
        json.loads(body)


def test_the_methods_table_and_the_gallery_show_every_method() -> None:
    assert {row[0] for row in rows("explain.md", "## Methods")} >= set(METHODS)
    pictures = (REPO / "docs" / "images" / "gallery").glob("*.png")
    of_scans = {name for name, method in METHODS.items() if method.stand_in is None}
    assert {picture.stem for picture in pictures} >= of_scans


@pytest.mark.parametrize(
    "page", [*sorted(REPO.glob("*.md")), *PAGES], ids=lambda page: str(page.relative_to(REPO))
)
def test_every_link_of_a_page_leads_to_a_file_and_its_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
            assert anchor in anchors, target


def test_every_page_is_linked_from_the_first_page_or_the_index() -> None:
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for index in (REPO / "README.md", REPO / "docs" / "README.md")
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", index.read_text())
    }
    assert {*(REPO / "docs").glob("*.md")} <= linked | {REPO / "docs" / "README.md"}


def test_each_sentence_about_what_reaches_what_has_its_tests() -> None:
    text = (
        (REPO / "docs" / "security.md")
        .read_text(encoding="utf-8")
        .partition("\n## What is left")[0]
    )
    sentences = re.findall(r"^- (?:.*\n?(?:  )?)+?(?=^- |^$|\Z)", text, re.M)
    assert len(sentences) > 15
    for sentence in sentences:
        named = re.findall(r"`((?:tests|plugins)/\S+\.py)::(test_\w+)`", sentence)
        assert named, f"no test stands beside: {sentence}"
        for file, test in named:
            assert f"\ndef {test}(" in (REPO / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_readmes_table_has_a_source_for_every_cell() -> None:
    beside = tomllib.loads((REPO / "docs" / "beside.toml").read_text(encoding="utf-8"))
    columns = list(beside["read"])
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for row in beside["row"]:
        lines.append([row["name"], *(row[column][0] for column in columns)])
        for column in columns:
            mark, *source = row[column]
            # That nothing was found is said of the snapshot; that there is something, of a place.
            assert all(source), (row["name"], column)
            assert source or mark in "✘?", (row["name"], column)
            if column == "Modelyard":
                files = re.findall(r"[\w/-]+\.(?:md|py)", source[0])
                assert all((REPO / file).is_file() for file in files)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert table in readme, "README's table and docs/beside.toml differ"
    losses = [row["name"] for row in beside["row"] if row["Modelyard"][0] == "✘"]
    assert len(losses) >= 7, "what others have and Modelyard has not is in the table too"
