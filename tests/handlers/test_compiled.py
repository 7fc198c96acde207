"""torch.compile and TensorRT, as model-config.yaml asks for them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modelyard.handlers import LoadError
from modelyard.handlers.models.backends import Artifact, open_artifact
from modelyard.handlers.models.packed import compile_artifact, compile_options, runs_on_tensorrt

IMAGES = [(torch.rand(rows, 1, 8, 8),) for rows in (1, 5)]


@pytest.fixture(scope="module")
def artifact(digits_artifacts: dict[str, Path]) -> Artifact:
    return open_artifact(digits_artifacts["pt2"], "pt2")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, None),
        ({"pt2": {"compile": {"enable": False, "mode": "default"}}}, None),
        ({"pt2": {"compile": {"enable": True}}}, {}),
        ({"pt2": {"compile": {"enable": True, "backend": "eager"}}}, {"backend": "eager"}),
    ],
)
def test_the_setting_is_torch_compiles(config: dict[str, Any], options: Any) -> None:
    assert compile_options(config) == options


@pytest.mark.parametrize(
    "section",
    [
        "inductor",
        {"compile": True},
        {"compile": {"enable": "yes"}},
        {"compile": {"enable": True, "fullgraph": True}},
        {"compile": {"enable": True, "mode": 3}},
    ],
)
def test_another_form_of_the_setting_is_refused(section: Any) -> None:
    with pytest.raises(LoadError, match=r"expected as in pt2: \{compile: \{enable: true"):
        compile_options({"pt2": section})


@pytest.mark.nightly
def test_a_compiled_program_answers_as_the_artifact_and_cannot_be_explained(
    artifact: Artifact,
) -> None:
    compiled = compile_artifact(artifact, {"backend": "aot_eager"}, IMAGES)
    with torch.inference_mode():
        for images in IMAGES:
            torch.testing.assert_close(compiled(*images), artifact(*images))
    assert not compiled.is_differentiable


def test_what_differs_once_compiled_is_not_served(artifact: Artifact) -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *tensors: [output + 1 for output in graph.forward(*tensors)]

    with pytest.raises(LoadError, match=r"makes differs from the artifact: .*max_abs"):
        compile_artifact(artifact, {"backend": wrong}, IMAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nobodys"}, "torch.compile.*nobodys.* fails: .*leave pt2.compile out"),
        ({"mode": "fastest"}, "torch.compile.*fastest.* fails: "),
        ({"backend": "tensorrt"}, "TensorRT needs a CUDA device"),
    ],
)
def test_what_cannot_be_compiled_says_why(
    artifact: Artifact, options: dict[str, str], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        compile_artifact(artifact, options, IMAGES)


def test_only_pt2_is_compiled(digits_artifacts: dict[str, Path]) -> None:
    onnx = open_artifact(digits_artifacts["onnx"], "onnx")
    with pytest.raises(LoadError, match=r"the artifact is onnx; expected pt2"):
        compile_artifact(onnx, {}, IMAGES)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in inductor
def test_inductor_answers_as_the_artifact(artifact: Artifact) -> None:
    compiled = compile_artifact(artifact, {"mode": "default"}, IMAGES)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*IMAGES[1]), artifact(*IMAGES[1]))


def test_tensorrt_says_what_it_lacks(digits_artifacts: dict[str, Path]) -> None:
    assert not runs_on_tensorrt({})
    assert runs_on_tensorrt({"onnx": {"tensorrt": True}})
    with pytest.raises(LoadError, match=r"expected onnx: \{tensorrt: true\}"):
        runs_on_tensorrt({"onnx": {"tensorrt": "yes"}})
    with pytest.raises(LoadError, match="TensorRT needs a CUDA device"):
        open_artifact(digits_artifacts["onnx"], "onnx", on_tensorrt=True)
    with pytest.raises(LoadError, match="holds pt2; expected onnx"):
        open_artifact(digits_artifacts["pt2"], "pt2", on_tensorrt=True)
