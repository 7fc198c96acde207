"""What is said of cells, and of the archives that they serve; nothing of Ray runs here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from modelyard.archiver import ArchiveError, open_archive
from modelyard.plugins.cluster.ray.archives import locate
from modelyard.plugins.cluster.ray.arguments import Plan, make_plan
from modelyard.plugins.cluster.ray.environment import ENVIRONMENT, HAPROXY, ray_environment
from modelyard.serve.errors import ServeError
from modelyard.serve.settings import Settings
from tests.serve.live import build_archive
from tests.serve.test_fetch import sends, serving

REPO = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for name in ("counting", "echo"):
        build_archive(folder, name)
    return folder


@pytest.fixture(autouse=True)
def of_no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def digest_of(path: Path) -> str:
    with open_archive(path) as archive:
        return archive.digest


def test_everything_that_a_cell_needs_is_in_the_plan(store: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"app predict sha256:{'0' * 64}\n")
    arguments, plan = make_plan({
        "model_store": str(store),
        "token_file": str(tokens),
        "cells": "3",
        "cpus": "5",
        "queue_size": "7",
    })  # fmt: skip
    assert (arguments.cells, plan.settings.queue_size) == (3, 7)
    assert plan.settings.workers == 2, "two models share five cores"
    assert plan.settings.asks_for_tokens
    assert plan.version == version("modelyard")
    assert {(each.name, each.digest) for each in plan.archives} == {
        (name, digest_of(store / f"{name}.mar")) for name in ("counting", "echo")
    }
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_changed_archive_of_the_same_name_makes_another_plan(store: Path, tmp_path: Path) -> None:
    said = {"model_store": str(tmp_path), "auth": "management"}
    shutil.copy(store / "echo.mar", tmp_path)
    _, before = make_plan(said)
    build_archive(tmp_path, "echo", version="2.0")
    _, after = make_plan(said)
    assert before.model_dump_json() != after.model_dump_json()


WRONG = [
    ({}, "model_store is missing"),
    ({"model_store": "{none}"}, "the model store {none} does not exist; name the folder"),
    ({"model_store": "{empty}"}, "the model store {empty} holds no archives; name the folder"),
    ({"model_store": "{store}", "auth": "auto"}, "no token file: all cells must know the same"),
    ({"token_file": "{none}/tokens.txt"}, "cannot read the token file"),
    ({"models": "other"}, "Model not found at: other; the model store "),
    ({"models": "echo,echo.mar"}, "echo and echo.mar both hold echo 1.0; leave one out"),
    ({"models": "echo#sha256=12"}, "expected #sha256= and 64 hexadecimal digits"),
    ({"models": f"echo#sha256={'0' * 64}"}, f"expected {'0' * 64}; put that archive back"),
    ({"models": "http://127.0.0.1/m.mar"}, "an archive that is fetched needs #sha256=DIGEST"),
    ({"models": f"file:///m.mar#sha256={'0' * 64}"}, "name its folder as model_store instead"),
    (
        {"models": f"oci://127.0.0.1/m#sha256={'0' * 64}"},
        "cannot fetch oci://127.0.0.1/m: expected",
    ),
    ({"port": "80"}, "port cannot be set"),
    ({"modelstore": "x"}, "there is no argument modelstore; did you mean model_store?"),
    ({"cell": "x"}, "there is no argument cell; did you mean cells?"),
    ({"cells": "none"}, "cells: expected a whole number, got 'none'"),
    ({"cells": "3", "max_cells": "2"}, "max_cells: expected 3 or more, as cells says, got '2'"),
    ({"workers": "-1"}, "workers: expected 0 or more, got '-1'"),
    ({"python": "{none}/python"}, "cannot start {none}/python: No such file or directory"),
]


@pytest.mark.parametrize(("said", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said_in_a_line(
    said: dict[str, str], message: str, store: Path, tmp_path: Path
) -> None:
    if said and "model_store" not in said:
        said = {"model_store": "{store}", **said}
    if "token_file" not in said:
        said = {"auth": "management", **said}
    (tmp_path / "empty").mkdir()
    places = {"{store}": str(store)}
    places |= {f"{{{name}}}": str(tmp_path / name) for name in ("none", "empty")}
    for mark, place_ in places.items():
        message = message.replace(mark, place_)
        said = {name: value.replace(mark, place_) for name, value in said.items()}
    with pytest.raises((ServeError, ArchiveError)) as caught:
        make_plan(said)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_archive_is_fetched_once_and_only_with_its_digest(store: Path, tmp_path: Path) -> None:
    echo = store / "echo.mar"
    cache = tmp_path / "cache"
    with serving(sends(echo.read_bytes())) as (url, asked):
        source = f"{url}/models/m.mar?v=1"
        wrong = {"models": f"{source}#sha256={'0' * 64}", "cache_dir": str(cache)}
        with pytest.raises(ArchiveError, match=f"its digest is {digest_of(echo)}, expected 000"):
            make_plan({**wrong, "auth": "management"})
        assert [file for file in cache.iterdir() if file.suffix != ".lock"] == []
        right = {**wrong, "models": f"mirror={source}#sha256={digest_of(echo)}"}
        for _ in range(2):
            _, plan = make_plan({**right, "auth": "management"})
    assert len(asked) == 2
    (archive,) = plan.archives
    assert (archive.name, archive.version, archive.location) == ("mirror", "1.0", source)
    placed = locate(archive.location, archive.digest, tmp_path, cache)
    assert placed.read_bytes() == echo.read_bytes()


def test_the_file_for_a_cluster_and_a_ray_that_is_started_here_have_the_same_variables() -> None:
    file = REPO / "deploy" / "ray" / "cells.env"
    ran = subprocess.run(
        ["sh", "-c", f"set -a; . {file}; env"], env={}, capture_output=True, text=True, check=True
    )
    said = dict(line.split("=", 1) for line in ran.stdout.splitlines() if line.startswith("RAY_"))
    assert said.pop("RAY_SERVE_HAPROXY_BINARY_PATH").endswith(
        "modelyard/plugins/cluster/ray/haproxy.sh"
    )
    usual = ray_environment(Settings().request_timeout_s)
    assert said.items() <= usual.items() >= ENVIRONMENT.items()
    assert len(said) == len(ENVIRONMENT) + 1


def test_haproxy_is_told_what_rays_file_cannot_say(tmp_path: Path) -> None:
    """Once, however often Ray starts it; cells of the machine are asked at their own address."""
    config, cell = tmp_path / "haproxy.cfg", tmp_path / "cell-ab12"
    cell.mkdir()
    (cell / "address").write_text("127.0.0.1:4711 localhost\n")
    config.write_text(
        "defaults\n    mode http\nfrontend http_frontend\n    bind *:8000\n"
        "    acl is_http-ours path /\n    # Static routing\n    use_backend http-ours\n"
        "backend http-ours\n    server R_ours-ab12 127.0.0.1:30000 check observe layer4\n"
        "    server R_ours-cd34 127.0.0.1:30001 check\n"
        "    server R_ours-ef56 10.0.0.2:30000 check\n"
        "backend http-other\n    server R_other-ab12 127.0.0.1:30000 check\n"
    )
    command = [str(HAPROXY), "-db", "-f", str(config)]
    (binary := tmp_path / "haproxy").write_text(
        '#!/bin/sh\nsleep 0.3\ncase $3 in\n*.large.cfg) : >"$(sed -n "s/.*bind unix@//p" "$3")" ;;'
        '\n*) ls "${3%/*}" ;;\nesac\n'
    )
    binary.chmod(0o755)
    haproxy = {"CELLS_HAPROXY": str(binary), "MODELYARD_STATE_DIR": str(tmp_path)}
    (tmp_path / "large.999999999").touch()
    first, _ = (
        subprocess.run(
            command, env={**os.environ, **haproxy}, check=True, text=True, stdout=subprocess.PIPE
        ).stdout
        for _ in range(2)
    )
    text, large = config.read_text(), (tmp_path / "haproxy.large.cfg").read_text()
    assert text.startswith("defaults\n    option http-buffer-request\n    option srvtcpka\n")
    assert text.count("http-buffer-request") == text.count("use_backend large if") == 1
    (socket,) = re.findall(rf"server large unix@{tmp_path}/(large\.\d+) maxconn 128", text)
    assert socket in first.split() and "large.999999999" not in first  # it listens before
    assert f"bind unix@{tmp_path}/{socket}\n" in large and "use_backend large" not in large
    assert "option dontlog-normal" in text
    assert "bind *:8000" in text and text.count("maxconn 128") == 1
    servers = re.findall(r"(?m)^    server R_\S+ (.*)$", text)
    assert servers == [
        "127.0.0.1:4711 check port 30000 tcp-ut 3s observe layer4",
        "127.0.0.1:30001 check tcp-ut 3s",
        "10.0.0.2:30000 check tcp-ut 3s",
        "127.0.0.1:30000 check tcp-ut 3s",
    ]
    assert text.count("    http-request set-header host localhost\n") == 1


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("wrong", ["", "Restrat=always", "Restart=sometimes"])
def test_systemd_takes_the_unit_of_the_head(wrong: str, tmp_path: Path) -> None:
    text = (REPO / "deploy" / "ray" / "ray-head.service").read_text()
    text = text.replace("/opt/modelyard/bin/ray", sys.executable)
    (unit := tmp_path / "ray-head.service").write_text(
        text.replace("Restart=always", wrong or "Restart=always")
    )
    ran = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert bool(ran.stderr) is bool(wrong), ran.stderr


def test_the_example_for_a_cluster_is_a_plan(store: Path, tmp_path: Path) -> None:
    example = yaml.safe_load((REPO / "deploy" / "ray" / "cells.yaml").read_text())
    (application,) = example["applications"]
    said = dict(application["args"], model_store=str(store), models="echo", auth="management")
    del said["token_file"]
    arguments, plan = make_plan(said)
    assert arguments.max_cells == 8
    assert plan.settings.workers == 2
    assert application["import_path"] == "modelyard.plugins.cluster.ray:app"
