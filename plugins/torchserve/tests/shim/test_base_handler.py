"""`ts.torch_handler.base_handler`: what archives of TorchServe hold is loaded and called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.request_envelope.body import BodyEnvelope

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError

MakeContext = Callable[..., Context]
EAGER = {"modelFile": "linear_net.py", "serializedFile": "linear.pth"}
ROWS = [[1.0, 1.0, 1.0], [0.0, 2.0, 0.0]]
ANSWERS = [[6.5, -1.0], [4.5, 0.5]]  # by hand, from the weights in conftest.py


def loaded(context: Context, kind: type[BaseHandler] = BaseHandler) -> BaseHandler:
    handler = kind()
    handler.initialize(context)
    return handler


def test_a_checkpoint_is_loaded_into_the_class_of_its_model_file(
    make_context: MakeContext, linear: nn.Linear
) -> None:
    handler = loaded(make_context(**EAGER))
    assert type(handler.model).__name__ == "Net"
    assert not handler.model.training
    assert (handler.device, handler.map_location) == (torch.device("cpu"), "cpu")
    assert handler.handle(ROWS, make_context(requests=2)) == ANSWERS


def test_a_model_file_alone_is_a_model_with_the_weights_it_makes(
    make_context: MakeContext, linear: nn.Linear
) -> None:
    handler = loaded(make_context(modelFile="linear_net.py"))
    assert handler.model_pt_path is None
    assert len(handler.handle(ROWS, make_context(requests=2))) == 2


@pytest.fixture
def artifact(tmp_path: Path, linear: nn.Linear) -> Callable[[str], str]:
    """Write the linear model as a file of the given suffix; give its name."""

    def write(suffix: str) -> str:
        path = tmp_path / f"m{suffix}"
        example = torch.zeros(2, 3)
        if suffix == ".pt":
            torch.jit.trace(linear, example).save(str(path))  # type: ignore[no-untyped-call]
        elif suffix == ".pt2":
            batch = ({0: torch.export.Dim("batch")},)
            torch.export.save(torch.export.export(linear, (example,), dynamic_shapes=batch), path)
        else:
            weights = {"w": linear.weight.detach().numpy(), "b": linear.bias.detach().numpy()}
            graph = onnx.helper.make_graph(
                [onnx.helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)],
                "linear",
                [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3])],
                [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 2])],
                [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
            )
            opset = [onnx.helper.make_opsetid("", 17)]
            onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
        return path.name

    return write


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("suffix", [".pt", ".pt2", ".onnx"])
def test_every_format_has_the_same_answers(
    make_context: MakeContext, artifact: Callable[[str], str], suffix: str
) -> None:
    handler = loaded(make_context(serializedFile=artifact(suffix)))
    assert handler.handle(ROWS, make_context(requests=2)) == ANSWERS


def test_an_onnx_model_is_the_session_that_authors_call(
    make_context: MakeContext, artifact: Callable[[str], str]
) -> None:
    session = loaded(make_context(serializedFile=artifact(".onnx"))).model
    (node,) = session.get_inputs()
    (output,) = session.run(None, {node.name: torch.tensor(ROWS).numpy()})
    assert output.tolist() == ANSWERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", [".so", ".pt2"])
def test_native_code_of_aotinductor_runs(
    make_context: MakeContext, linear: nn.Linear, tmp_path: Path, suffix: str
) -> None:
    path = str(tmp_path / f"native{suffix}")
    program = torch.export.export(
        linear, (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    if suffix == ".so":
        options = {"aot_inductor.output_path": path}
        torch._export.aot_compile(program.module(), (torch.zeros(2, 3),), options=options)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    context = make_context(
        {"pt2": {"export": {"aot_compile": True}}}, serializedFile=f"native{suffix}"
    )
    assert loaded(context).handle(ROWS, make_context(requests=2)) == ANSWERS


class Marker:
    """Unpickling it would be running an author's code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("extra", [Marker(), nn.ReLU()], ids=["code", "module"])
def test_a_checkpoint_that_holds_more_than_tensors_is_refused_and_not_run(
    make_context: MakeContext,
    linear: nn.Linear,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: Any,
) -> None:
    torch.save({"state": linear.state_dict(), "extra": extra}, tmp_path / "linear.pth")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"linear\.pth is not made of tensors alone but holds") as e:
        loaded(make_context(**EAGER))
    assert "nothing of it was run" in str(e.value)
    assert not (tmp_path / "unpickled").exists()


def test_a_checkpoint_of_another_model_is_named(
    make_context: MakeContext, linear: nn.Linear, tmp_path: Path
) -> None:
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "linear.pth")
    with pytest.raises(LoadError, match=r"linear\.pth does not fit: .*size mismatch"):
        loaded(make_context(**EAGER))


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ({"serializedFile": "linear.pth"}, RuntimeError, "No model weights could be loaded"),
        ({"serializedFile": "m.so"}, RuntimeError, "No model weights could be loaded"),
        ({}, RuntimeError, "No model weights could be loaded"),
        ({"modelFile": "absent.py"}, RuntimeError, r"Missing the model\.py file"),
        ({"modelFile": "two.py"}, ValueError, "Expected only one class as model definition"),
    ],
    ids=["checkpoint alone", "library without pt2", "nothing", "no model file", "two classes"],
)
def test_what_cannot_be_loaded_is_said(
    make_context: MakeContext,
    linear: nn.Linear,
    tmp_path: Path,
    model: dict[str, str],
    kind: type[Exception],
    message: str,
) -> None:
    (tmp_path / "two.py").write_text(
        "class A:\n    pass\n\n\nclass B:\n    pass\n", encoding="utf-8"
    )
    with pytest.raises(kind, match=message):
        loaded(make_context(**model))


@pytest.mark.parametrize(
    ("pt2", "options"),
    [
        ("eager", {"backend": "eager"}),
        ({"backend": "eager", "mode": "x"}, {"backend": "eager", "mode": "x"}),
        ({"compile": {"enable": True, "backend": "eager"}}, {"backend": "eager"}),
        ({"compile": {"enable": True}}, {}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"compile": {"backend": "eager"}}, None),
        ({"export": {"aot_compile": True}}, None),
        ({"compile": {"enable": True, "backend": "no such"}}, None),
    ],
)
def test_pt2_of_the_configuration_says_how_to_compile(
    make_context: MakeContext,
    linear: nn.Linear,
    monkeypatch: pytest.MonkeyPatch,
    pt2: Any,
    options: dict[str, str] | None,
) -> None:
    calls: list[dict[str, Any]] = []

    def compile_(model: Any, **given: Any) -> Any:
        calls.append(given)
        raise RuntimeError("a backend that fails")  # which leaves the model as it is

    monkeypatch.setattr(torch, "compile", compile_)
    config = {"pt2": pt2}
    assert loaded(make_context(config, **EAGER)).handle(ROWS, make_context(requests=2)) == ANSWERS
    assert calls == ([] if options is None else [options])
    assert config == {"pt2": pt2}


def test_another_pt2_is_refused(make_context: MakeContext, linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match="pt2 should be str or dict"):
        loaded(make_context({"pt2": 3}, **EAGER))


def test_a_compiled_model_answers_the_same(make_context: MakeContext, linear: nn.Linear) -> None:
    handler = loaded(make_context({"pt2": "eager"}, **EAGER))
    assert type(handler.model).__name__ == "OptimizedModule"
    assert handler.handle(ROWS, make_context(requests=2)) == ANSWERS


def test_labels_come_with_the_archive(
    make_context: MakeContext, linear: nn.Linear, tmp_path: Path
) -> None:
    assert loaded(make_context(**EAGER)).mapping is None
    (tmp_path / "index_to_name.json").write_text(
        '{"0": ["n0", "cat"], "1": "dog"}', encoding="utf-8"
    )
    assert loaded(make_context(**EAGER)).mapping == {"0": "cat", "1": "dog"}


class Explainer(BaseHandler):
    def preprocess(self, data: Any) -> Tensor:
        return torch.tensor([row["data"] for row in data])

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> list[Any]:
        return [[inputs, target]] * len(tensor_data)

    def describe_handle(self) -> dict[str, str]:
        return {"about": "explains"}


@pytest.mark.parametrize(
    ("targets", "given"),
    [
        ([None], 0),
        ([2], 2),
        ([bytearray(b"3")], 3),
        (["1"], 1),
        ([1, 1], 1),
        ([1, 0], [1, 0]),
    ],
    ids=["none", "number", "form field", "text", "one for all", "one each"],
)
def test_the_explain_header_asks_for_insights(
    make_context: MakeContext, linear: nn.Linear, targets: list[Any], given: Any
) -> None:
    handler = loaded(make_context(**EAGER), Explainer)
    assert handler.explain is False
    rows = [{"data": [1.0], "target": target} for target in targets]
    context = make_context(headers={"explain": "True"}, requests=len(rows))
    assert handler.handle(rows, context) == [[[1.0], given]] * len(rows)
    assert handler.explain is True


def test_the_describe_header_asks_for_the_handlers_own_description(
    make_context: MakeContext, linear: nn.Linear
) -> None:
    context = make_context(headers={"describe": "True"})
    assert loaded(make_context(**EAGER)).handle([{}], context) == [None]
    handler = loaded(make_context(**EAGER), Explainer)
    assert handler.handle([{}], context) == [{"about": "explains"}]


def test_each_batch_reports_its_time(make_context: MakeContext, linear: nn.Linear) -> None:
    context = make_context({"handler": {"profile": True}}, **EAGER)
    BodyEnvelope(loaded(context).handle).handle([{"body": ROWS[0]}], context)
    names = [record["name"] for record in context.metrics.drain()]
    assert names == [
        "ts_handler_preprocess",
        "ts_handler_inference",
        "ts_handler_postprocess",
        "HandlerTime",
    ]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_profiler_leaves_a_trace(
    make_context: MakeContext, linear: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handler = loaded(make_context(**EAGER))
    handler.profiler_args = {"activities": [torch.profiler.ProfilerActivity.CPU]}
    assert handler.handle(ROWS, make_context(requests=2)) == ANSWERS
    assert len(list((tmp_path / "pytorch_profiler" / "m").glob("*.json"))) == 1


@pytest.mark.gpu
def test_on_a_gpu_everything_is_there(
    make_context: MakeContext, linear: nn.Linear, tmp_path: Path
) -> None:
    context = make_context(**EAGER)
    context.system_properties["gpu_id"] = 0
    handler = loaded(context)
    assert (handler.device, handler.map_location) == (torch.device("cuda:0"), "cuda")
    assert next(handler.model.parameters()).device == handler.device
    assert handler.handle(ROWS, make_context(requests=2)) == ANSWERS
