import hashlib
import json
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard import cli
from modelyard.archiver.manifest import SCHEMA
from modelyard.exporter.cli import inspect_app
from modelyard.exporter.errors import CheckpointError, UsageError
from modelyard.exporter.inspection import describe, is_finite
from tests.exporter.ingest.honest import WRITERS
from tests.exporter.ingest.hostile import FILES


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(inspect_app, list(arguments))


def file_of(path: Path, name: str) -> bytes:
    return (path / name if path.is_dir() else path).read_bytes()


@pytest.mark.parametrize("name", WRITERS)
def test_every_honest_checkpoint_is_described_in_json(name: str, tmp_path: Path) -> None:
    written = WRITERS[name](tmp_path)
    found = describe(written.path)
    json.dumps(found, allow_nan=False)
    kinds = (found["kind"], found.get("serialized", {}).get("kind"))
    assert written.kind in kinds or found["what"] == "archive"
    if found["what"] == "checkpoint":
        assert found["loader"] == written.loader
        assert found["files"]
        for file in found["files"]:
            assert file["sha256"] == hashlib.sha256(file_of(written.path, file["name"])).hexdigest()
    if not written.options:
        assert {tensor["name"] for tensor in found["tensors"]} == set(written.expected)


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A training checkpoint with averaged weights and one NaN."""
    torch.manual_seed(0)
    net = nn.Linear(1000, 3)
    averaged = {f"module.{key}": value.clone() for key, value in net.state_dict().items()}
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    weights["bias"][1] = math.nan
    content = {
        "epoch": 4,
        "model": weights,
        "ema_state_dict": averaged,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1).state_dict(),
        "hyper_parameters": {"width": np.int64(3), "[red]rate": 0.5},
    }
    torch.save(content, tmp_path / "loop.pt")
    return tmp_path / "loop.pt"


def test_weights_training_and_hyper_parameters_are_listed(loop: Path) -> None:
    found = describe(loop)
    assert found["weights"] == {
        "key": "model",
        "parameters": 3003,
        "size_bytes": 12012,
        "prefixes_stripped": [],
        "tied": [],
        "non_finite": ["bias"],
        "alternatives": {"ema_state_dict": 3003},
        "ema_key": "ema_state_dict",
    }
    assert found["tensors"][0] == {
        "name": "weight",
        "dtype": "float32",
        "shape": [3, 1000],
        "size_bytes": 12000,
    }
    assert found["hyper_parameters"] == {"width": 3, "[red]rate": 0.5}
    assert found["training"]["epoch"] == 4
    assert "optimizer: 1 parameter group" in found["training"]["optimizers"][0]


def test_other_weights_are_listed_when_asked_for(loop: Path) -> None:
    for found in (describe(loop, ema=True), describe(loop, "ema_state_dict")):
        assert found["weights"]["key"] == "ema_state_dict"
        assert found["weights"]["prefixes_stripped"] == ["module."]
        assert found["weights"]["non_finite"] == []
    with pytest.raises(UsageError, match="did you mean ema_state_dict"):
        describe(loop, "ema_state")


def test_the_tables_name_what_the_file_holds(loop: Path) -> None:
    result = _run(str(loop), "--top", "1")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.split() == ["parameters", "3,003"] for line in lines)
    assert any(line.split()[:2] == ["not", "finite"] and "bias" in line for line in lines)
    assert any("the 1 largest of 2" in line for line in lines)
    assert any(line.startswith("[red]rate") for line in lines), "names are not markup"
    assert any(line.split() == ["total", "12.0", "kB"] for line in lines)


def test_json_holds_every_tensor(loop: Path) -> None:
    result = _run(str(loop), "--json", "--top", "1")
    assert result.exit_code == 0
    assert len(json.loads(result.output)["tensors"]) == 2


def test_several_networks_are_named_with_a_way_to_choose(tmp_path: Path) -> None:
    content = {"netG": nn.Linear(4, 4).state_dict(), "netD": nn.Linear(2, 2).state_dict()}
    torch.save(content, tmp_path / "gan.pt")
    found = describe(tmp_path / "gan.pt")
    assert found["weights"]["key"] == "netG"
    assert found["weights"]["alternatives"] == {"netD": 6}
    assert "nothing tells which weights are meant" in found["notes"][0]


@pytest.mark.parametrize(
    "name",
    [name for name, file in FILES.items() if "system" in file.says and not file.is_refused],
)
def test_refused_names_of_a_hostile_file_are_printed(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    path = FILES[name].write(tmp_path / "file", tmp_path / "marker")
    result = _run(str(path))
    assert result.exit_code == 0, result.output
    assert "refused posix.system: not imported" in result.output
    assert "may have been made to run a command" in result.output
    assert not (tmp_path / "marker").exists()


_PIPELINE = b"\x8c\x10sklearn.pipeline\x94\x8c\x08Pipeline\x94\x93\x94)\x81"


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        pytest.param(
            b"\x80\x04" + _PIPELINE,
            "holds a sklearn.pipeline.Pipeline, of which nothing was loaded",
            id="scikit-learn",
        ),
        pytest.param(
            zlib.compress(b"\x80\x04}\x94(\x8c\x05model\x94" + _PIPELINE),
            'file.pt")["model"]; rows = numpy.zeros((1, model.n_features_in_), "float32")',
            id="packed, in a dict",
        ),
        pytest.param(
            b"\x80\x02clightgbm.sklearn\nLGBMClassifier\nq\x00)\x81",
            "onnxmltools.convert_lightgbm(model",
            id="LightGBM",
        ),
        pytest.param(b'{"learner":{', "onnxmltools.convert_xgboost(model", id="XGBoost's own"),
        pytest.param(b"tree\nversion=v4\n", "lightgbm.Booster(model_file", id="LightGBM's own"),
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"hello", "is not a checkpoint that can be read", id="text"),
        pytest.param(b"PK\x03\x04 broken", "cut short", id="cut zip"),
        pytest.param(b"GGUF" + bytes(40), "a file of llama.cpp", id="GGUF"),
        pytest.param(b"\x89HDF\r\n\x1a\n" + bytes(40), "a file of Keras", id="HDF5"),
        pytest.param(b"\x80\x04\x95" + bytes(20), "a bare pickle", id="pickle"),
        pytest.param(bytes(4) + b"ET12" + bytes(20), "exported for ExecuTorch", id="ExecuTorch"),
        pytest.param(b"<?xml version='1.0'?>", "exported for OpenVINO", id="OpenVINO"),
    ],
)
def test_what_is_no_checkpoint_is_named_with_advice(
    content: bytes, seen: str, tmp_path: Path
) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    result = _run(str(tmp_path / "file.pt"))
    assert result.exit_code == 1
    assert seen in result.output


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        pytest.param(["adapter_config.json"], "merge_and_unload", id="PEFT"),
        pytest.param(["latest_checkpointed_iteration.txt"], "Megatron", id="Megatron"),
        pytest.param(["data.pkl", "data", "version"], "unpacked", id="unpacked zip"),
        pytest.param([], "the folder that a trainer wrote", id="empty"),
        pytest.param(["config.json"], "no file of weights", id="no weights"),
        pytest.param(
            ["config.json", "tf_model.h5"], "weights of another framework, alone", id="TensorFlow"
        ),
        pytest.param(["a.safetensors", "b.safetensors"], "several files", id="two"),
    ],
)
def test_a_folder_without_weights_is_named_with_advice(
    files: list[str], seen: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=seen):
        describe(tmp_path)


def test_deepspeed_shards_are_refused_with_advice(tmp_path: Path) -> None:
    inside = tmp_path / "global_step5"
    inside.mkdir()
    (tmp_path / "latest").write_text("global_step5", encoding="utf-8")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": None}, inside / name)
    with pytest.raises(CheckpointError, match=r"ZeRO stage 3 .*zero_to_fp32"):
        describe(tmp_path)
    (inside / name).unlink()
    for rank in (0, 1):
        torch.save({"module": {}}, inside / f"mp_rank_0{rank}_model_states.pt")
    with pytest.raises(CheckpointError, match="2 model-parallel ranks"):
        describe(tmp_path)


def _onnx_file(path: Path, location: str | None = None) -> Path:
    helper: Any = onnx.helper
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [3, 2], [0.0] * 6)
    if location is not None:
        weight.ClearField("float_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 2])],
        [weight],
    )
    path.write_bytes(helper.make_model(graph, producer_name="a test").SerializeToString())
    return path


def test_an_onnx_artifact_is_described_from_its_protobuf(tmp_path: Path) -> None:
    found = describe(_onnx_file(tmp_path / "net.bin"))
    assert (found["what"], found["kind"], found["writer"]) == ("artifact", "ONNX", "a test")
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
    assert found["outputs"] == [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}]
    assert found["weights"]["parameters"] == 6


def test_weights_outside_of_an_onnx_files_folder_are_not_followed(tmp_path: Path) -> None:
    found = describe(_onnx_file(tmp_path / "net.onnx", "../../etc/passwd"))
    assert found["notes"] == [
        'weights lie outside of its folder, which is refused: "../../etc/passwd"'
    ]


def test_an_exported_program_is_described_from_its_json(tmp_path: Path) -> None:
    program = torch.export.export(
        nn.Linear(3, 2).eval(),
        (torch.zeros(4, 3),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},),
    )
    torch.export.save(program, tmp_path / "net.pt2")
    found = describe(tmp_path / "net.pt2")
    (value,) = found["inputs"]
    symbol = value["shape"][0]
    assert value == {"name": "input", "dtype": "float32", "shape": [symbol, 3]}
    assert found["dims"] == {symbol: {"min": 1, "max": 8}}
    assert found["writer_version"] == torch.__version__
    assert _run(str(tmp_path / "net.pt2")).exit_code == 0


def test_an_unsafe_exported_program_is_described_and_said_to_be(tmp_path: Path) -> None:
    path = FILES["sample inputs of a pt2 that call"].write(tmp_path, tmp_path / "marker")
    found = describe(path)
    assert found["refused"] == ["posix.system"]
    assert any(note.startswith("not safe to load") for note in found["notes"])
    assert not (tmp_path / "marker").exists()


def test_a_traced_program_says_what_it_was_traced_with(tmp_path: Path) -> None:
    found = describe(WRITERS["TorchScript, traced"](tmp_path).path)
    assert found["what"] == "artifact"
    assert any("traced with tensors of shape [3, 2]" in note for note in found["notes"])


def test_an_archive_is_described_with_its_manifest_and_weights(tmp_path: Path) -> None:
    found = describe(WRITERS["TorchServe archive, zip"](tmp_path).path)
    assert (found["what"], found["writer"]) == ("archive", "torch-model-archiver")
    assert found["manifest"]["model"]["handler"] == "image_classifier"
    assert found["serialized"] == {"name": "net.pt", "kind": "TorchServe archive (state dict)"}
    assert found["labels"] == {"0": "cat", "1": "dog"}
    assert {file["name"] for file in found["files"]} >= {"net.pt", "MAR-INF/MANIFEST.json"}
    assert _run(str(tmp_path / "net.mar")).exit_code == 0


def test_an_archive_of_an_artifact_shows_the_artifact(tmp_path: Path) -> None:
    names = ("net.onnx", "net.pt2", "net.pt2.report.json", "0.request", "0.expected.json")
    files = dict.fromkeys(names, b"{}")
    files["net.onnx"] = _onnx_file(tmp_path / "net.onnx").read_bytes()
    pin = f"six==1.0 --hash=sha256:{'0' * 64}"
    files["MAR-INF/requirements.lock"] = f"{pin}\n".encode()
    model = {"modelName": "net", "modelVersion": "1.0", "handler": "base_handler"}
    golden = {"request": "0.request", "content_type": "image/png", "expected": "0.expected.json"}
    seal = {
        "schema": SCHEMA,
        "digests": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        "golden": [{**golden, "tolerance": 0.1}],
        "explain": {"artifact": "net.pt2", "report": "net.pt2.report.json"},
        "requirements": [pin],
    }
    manifest = {"runtime": "python", "model": {**model, "serializedFile": "net.onnx"}}
    with zipfile.ZipFile(tmp_path / "net.mar", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({**manifest, "modelyard": seal}))
    found = describe(tmp_path / "net.mar")
    assert (found["writer"], found["serialized"]["kind"]) == ("modelyard", "ONNX")
    assert found["inputs"][0]["name"] == "x"
    assert found["model"]["golden_requests"] == 1
    printed = _run(str(tmp_path / "net.mar")).output
    for row in ("model +net 1.0", "handler +base_handler", "explained by +net.pt2"):
        assert re.search(row, printed)
    assert re.search("requires +six==1.0 *\n", printed)


def test_a_manifest_of_wrong_types_is_refused_as_verify_does(tmp_path: Path) -> None:
    seal = {"golden": 3, "explain": "x", "requirements": 7}
    with zipfile.ZipFile(tmp_path / "net.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": 5, "modelyard": seal}))
    result = _run(str(tmp_path / "net.mar"))
    assert result.exit_code == 1
    assert "modelyard.requirements: expected a list, found 7" in result.output


def test_the_one_command_knows_inspect(loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(loop), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "training checkpoint"


def test_wrong_weights_are_wrong_usage(loop: Path) -> None:
    result = _run(str(loop), "--weights-key", "nothing")
    assert result.exit_code == 2
    assert "has no weights there; it has model (3,003 parameters)" in result.output


def _sparse_nan() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)
        return torch.tensor([[0.0, math.nan]]).to_sparse_csr()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: torch.tensor([1.0, math.inf]), False, id="infinity"),
        pytest.param(lambda: torch.tensor([1.0, math.nan]).half(), False, id="half"),
        pytest.param(lambda: torch.tensor([1, 2]), True, id="integers"),
        pytest.param(lambda: torch.tensor([math.nan]).expand(5), False, id="expanded"),
        pytest.param(lambda: torch.tensor([complex(0, math.nan)]), False, id="complex"),
        pytest.param(lambda: torch.ones(3).to(torch.float8_e5m2), True, id="float8"),
        pytest.param(_sparse_nan, False, id="sparse"),
        pytest.param(lambda: torch.empty(3, device="meta"), True, id="meta"),
    ],
)
def test_numbers_that_are_not_finite_are_found(
    make: Callable[[], torch.Tensor], expected: bool
) -> None:
    assert is_finite(make()) is expected
