"""Archives in a real server: containers, golden requests, signatures, requirements."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import write_archive
from modelyard.archiver.keys import generate_keys
from modelyard.archiver.signing import read_signing_key
from tests.archiver.wheels import build_wheel
from tests.serve.live import LiveServer, running, start_arguments
from tests.serve.live import modelyard as run_modelyard
from tests.shared import DIGITS

SCANS = DIGITS / "scans"
HANDLER = "import json\n\n\ndef handle(data, context):\n    return ['one' for row in data or []]\n"


def write(store: Path, name: str, code: str = HANDLER, **arguments: Any) -> Path:
    """Archive a handler that needs no model."""
    inputs = store.parent / f"inputs-{name}"
    inputs.mkdir(exist_ok=True)
    (inputs / "weights.bin").write_bytes(b"none")
    (inputs / "handler.py").write_text(code)
    given: dict[str, Any] = {"version": "1.0", "output_dir": store, **arguments}
    return write_archive(
        name,
        artifact=inputs / "weights.bin",
        handler=f"{inputs}/handler.py",
        **given,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "store"


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    for name, archive_format in (("zipped", "zip-store"), ("tarred", "tgz")):
        write(store, name, archive_format=archive_format)
    write(store, "folder", archive_format="no-archive")
    with running(tmp_path_factory.mktemp("state"), store, "--models=ALL", "--workers=1") as server:
        yield server


@pytest.mark.parametrize("name", ["zipped", "tarred", "folder"])
def test_every_container_of_the_store_is_served(server: LiveServer, name: str) -> None:
    assert server.predict(name, b"x").text == "one"


# -- golden requests -----------------------------------------------------------------------------


def digits_version(
    store: Path, artifacts: dict[str, Path], version: str, labels: str, mean: float = 0.0
) -> str:
    """Archive the digits model with labels and preprocessing of our choice; return the file."""
    inputs = store.parent / f"digits-{version}"
    inputs.mkdir(exist_ok=True)
    (inputs / "index_to_name.json").write_text(labels)
    (inputs / "model-config.yaml").write_text(
        f"handler:\n  image: {{mode: L, size: [8, 8], mean: [{mean}], std: [1.0]}}\n"
    )
    path = write_archive(
        "digits",
        version=version,
        artifact=artifacts["onnx"],
        handler="image_classifier",
        output_dir=store,
        extra_files=[inputs / "index_to_name.json"],
        config_file=inputs / "model-config.yaml",
        examples=[f"{SCANS}/{digit}.png={digit}" for digit in range(10)],
        force=True,
    )
    return path.rename(store / f"digits-{version}.mar").name


def test_a_version_that_answers_wrong_never_replaces_one_that_serves(
    server: LiveServer, store: Path, digits_artifacts: dict[str, Path]
) -> None:
    labels = json.dumps({str(i): str(i) for i in range(10)})
    good = digits_version(store, digits_artifacts, "1.0", labels)
    assert server.register(good, initial_workers=1).status_code == 200

    def answers() -> list[str]:
        found = (server.predict("digits", (SCANS / f"{i}.png").read_bytes()) for i in range(10))
        return [max(answer.json(), key=answer.json().get) for answer in found]

    expected = list("0123456789")
    assert answers() == expected
    swapped = json.dumps({str(i): str(9 - i) for i in range(10)})
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("2.0", {"labels": swapped}, "golden request 0 (MAR-INF/golden/0.request): expected the "),
        ("3.0", {"labels": labels, "mean": 5.0}, "the preprocessing are not those that the arch"),
    )
    for version, changes, said in cases:
        bad = digits_version(store, digits_artifacts, version, **changes)
        refused = server.register(bad, initial_workers=1)
        assert refused.status_code == 400
        assert said in refused.json()["message"]
        assert answers() == expected
    versions = server.management.get("/models/digits/all").json()
    assert [each["modelVersion"] for each in versions] == ["1.0"]


def test_a_changed_weight_file_is_refused_with_its_name(
    server: LiveServer, store: Path, digits_artifacts: dict[str, Path]
) -> None:
    labels = json.dumps({str(i): str(i) for i in range(10)})
    path = store / digits_version(store, digits_artifacts, "4.0", labels)
    data = bytearray(path.read_bytes())
    data[data.index(b"digits.onnx") + 2000] ^= 1
    path.write_bytes(data)

    refused = server.register(path.name, initial_workers=1)

    assert refused.status_code == 400
    assert '"digits.onnx": SHA-256 is ' in refused.json()["message"]


# -- requirements --------------------------------------------------------------------------------

SOUP = "import soup\n\n\ndef handle(data, context):\n    return [soup.SAYS for row in data or []]\n"


def test_requirements_are_refused_unless_installing_is_allowed(
    server: LiveServer, store: Path
) -> None:
    wheels = store.parent / "wheels"
    build_wheel(wheels, "soup", code="SAYS = 'hot'\n")
    (store.parent / "requirements.txt").write_text("soup\n")
    write(
        store,
        "soup",
        SOUP,
        requirements_file=store.parent / "requirements.txt",
        wheels_dir=wheels,
    )

    refused = server.register("soup.mar", initial_workers=1)

    assert refused.status_code == 400
    assert (
        "soup.mar requires soup 1.0, not installed here; start the server with --inst"
        in (refused.json()["message"])
    )


@pytest.mark.nightly
def test_wheels_that_travel_inside_are_installed_once_per_digest(tmp_path: Path) -> None:
    wheels, store = tmp_path / "wheels", tmp_path / "store"
    build_wheel(wheels, "soup", code="SAYS = 'hot'\n")
    (tmp_path / "requirements.txt").write_text("soup\n")
    pinned: dict[str, Any] = {
        "requirements_file": tmp_path / "requirements.txt",
        "wheels_dir": wheels,
    }
    for name in ("one", "two"):
        write(store, name, SOUP, **pinned)
    with running(tmp_path / "state", store, "--install-requirements", "--workers=1") as server:
        for name in ("one", "two"):
            assert server.register(f"{name}.mar", initial_workers=1).status_code == 200
            assert server.predict(name, b"x").text == "hot"
        (environment,) = (tmp_path / "state" / "environments").glob("*/complete")
        server.logs("one.mar: installing")
        assert server.log.count("one.mar: installing 1 requirements into ") == 1
        assert "two.mar: installing" not in server.log
        interpreter = environment.parent / "bin" / "python"
        assert interpreter.exists()

        (wheels / "soup-1.0-py3-none-any.whl").unlink()
        build_wheel(wheels, "ts", code="raise SystemExit\n")
        (tmp_path / "requirements.txt").write_text("ts\n")
        write(store, "three", **pinned)
        refused = server.register("three.mar", initial_workers=1)
        assert (refused.status_code, "bring modules named ts" in refused.text) == (400, True)
        assert len(list((tmp_path / "state" / "environments").glob("*/complete"))) == 1


# -- signatures ----------------------------------------------------------------------------------


def test_a_server_that_requires_signatures_serves_nothing_else(tmp_path: Path) -> None:
    private, public = generate_keys()
    (tmp_path / "release.key").write_bytes(private)
    (tmp_path / "release.pub").write_bytes(public)
    store = tmp_path / "store"
    write(store, "signed", key=read_signing_key(tmp_path / "release.key"))
    write(store, "unsigned")
    (tmp_path / "other.key").write_bytes(generate_keys()[0])
    write(store, "foreign", key=read_signing_key(tmp_path / "other.key"))

    options = ("--require-signature", f"--trusted-keys={tmp_path}/release.pub", "--workers=1")
    with running(tmp_path / "state", store, "--models=signed", *options) as server:
        assert server.predict("signed", b"x").text == "one"
        for name, said in (("unsigned", "is not signed"), ("foreign", "which is not trusted")):
            refused = server.register(f"{name}.mar", initial_workers=1)
            assert refused.status_code == 400
            assert said in refused.json()["message"]
        assert [model["modelName"] for model in server.management.get("/models").json()["models"]]


def test_requiring_signatures_without_keys_is_an_error_at_the_start(tmp_path: Path) -> None:
    ran = run_modelyard(*start_arguments(tmp_path / "state", tmp_path), "--require-signature")

    assert ran.returncode == 2
    assert "--require-signature: name the file of public keys with" in ran.stderr
