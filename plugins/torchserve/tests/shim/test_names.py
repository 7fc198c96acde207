"""Every name that handlers in the wild import, and the helpers behind them."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ts.handler_utils.distributed import deepspeed, pt_pippy
from ts.handler_utils.preprocess import dali
from ts.handler_utils.utils import import_class, send_intermediate_predict_response
from ts.model_loader import BUILT_IN, ModelLoaderFactory
from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler
from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler
from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
from ts.utils import util

from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import import_class as import_place
from modelyard.handlers.errors import LoadError
from modelyard.handlers.errors import PredictionException as Ours
from modelyard.plugins.torchserve.archiver.refused import REASONS

MakeContext = Callable[..., Context]

NAMES = {
    "ts": ["__version__"],
    "ts.version": ["__version__"],
    "ts.context": ["Context", "RequestProcessor"],
    "ts.handler_utils.distributed.deepspeed": ["get_ds_engine"],
    "ts.handler_utils.distributed.pt_pippy": ["get_pipeline_driver", "initialize_rpc_workers"],
    "ts.handler_utils.hf_batch_streamer": ["TextIteratorStreamerBatch"],
    "ts.handler_utils.micro_batching": ["MicroBatching"],
    "ts.handler_utils.text_utils": ["get_tokenizer", "ngrams_iterator"],
    "ts.handler_utils.timer": ["timed"],
    "ts.handler_utils.utils": ["import_class", "send_intermediate_predict_response"],
    "ts.metrics.dimension": ["Dimension"],
    "ts.metrics.metric": ["Metric"],
    "ts.metrics.metric_cache_yaml_impl": ["MetricsCacheYamlImpl"],
    "ts.metrics.metric_type_enum": ["MetricTypes"],
    "ts.metrics.metrics_store": ["MetricsStore"],
    "ts.model_loader": ["ModelLoaderFactory", "TsModelLoader"],
    "ts.protocol.otf_message_handler": ["send_intermediate_predict_response"],
    "ts.service": ["PredictionException", "Service", "emit_metrics"],
    "ts.torch_handler.base_handler": ["BaseHandler"],
    "ts.torch_handler.dali_handler": ["DALIHandler"],
    "ts.torch_handler.dali_image_classifier": ["DALIImageClassifier"],
    "ts.torch_handler.distributed.base_deepspeed_handler": ["BaseDeepSpeedHandler"],
    "ts.torch_handler.distributed.base_pippy_handler": ["BasePippyHandler"],
    "ts.torch_handler.image_classifier": ["ImageClassifier"],
    "ts.torch_handler.image_segmenter": ["ImageSegmenter"],
    "ts.torch_handler.object_detector": ["ObjectDetector"],
    "ts.torch_handler.text_classifier": ["TextClassifier"],
    "ts.torch_handler.text_handler": ["TextHandler"],
    "ts.torch_handler.unit_tests.test_utils.mock_context": ["MockContext"],
    "ts.torch_handler.vision_handler": ["VisionHandler"],
    "ts.utils.util": [
        "CLEANUP_REGEX",
        "PT2Backend",
        "PredictionException",
        "check_valid_pt2_backend",
        "deprecated",
        "get_yaml_config",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_there(module: str) -> None:
    assert set(NAMES[module]) <= set(dir(importlib.import_module(module)))


def test_a_worker_imports_torch_when_its_handler_does() -> None:
    code = (
        "import sys; from modelyard.serve.worker import __main__, dialect; dialect.find_dialect(); "
        "print(*sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "PIL", "onnxruntime"} & set(ran.stdout.split())


def test_importing_them_all_costs_nothing_heavy() -> None:
    code = (
        "import importlib, pkgutil, sys; "
        "from modelyard.serve.worker import dialect; dialect.find_dialect(); import ts; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(ts.__path__, 'ts.')]; "
        "print(*sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {
        "captum",
        "matplotlib",
        "onnxruntime",
        "transformers",
        "torchvision",
        "fastapi",
        "httpx",
    }
    assert not heavy & set(ran.stdout.split())


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_run_here_says_so(make_context: MakeContext, linear: Any, name: str) -> None:
    context = make_context({}, modelFile="linear_net.py")
    kinds: dict[str, Any] = {name: import_place(place) for name, place in BUILT_IN.items()}
    kinds |= {"BasePippyHandler": BasePippyHandler, "BaseDeepSpeedHandler": BaseDeepSpeedHandler}
    functions: dict[str, Any] = {
        "get_dali_pipeline": dali.get_dali_pipeline,
        "get_ds_engine": deepspeed.get_ds_engine,
        "get_pipeline_driver": pt_pippy.get_pipeline_driver,
        "initialize_rpc_workers": pt_pippy.initialize_rpc_workers,
    }
    with pytest.raises(LoadError, match=f"{name} is not served: .*; (serve|use) "):
        if name in functions:
            functions[name](None, 1, context)
        else:
            kinds[name]().initialize(context)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"0": "cat"}, {"0": "cat"}),
        ({"0": ["n01", "cat"]}, {"0": "cat"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
        ({"0": 5}, "gives 0 the label 5"),
        (["cat"], "expected an object"),
    ],
    ids=["text", "list", "names", "number", "no object"],
)
def test_labels_come_in_three_forms(tmp_path: Path, content: Any, expected: Any) -> None:
    file = tmp_path / "index_to_name.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            util.load_label_mapping(str(file))
    else:
        assert util.load_label_mapping(str(file)) == expected


def test_without_labels_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert util.load_label_mapping(str(tmp_path / "none.json")) is None
    assert caplog.records[0].levelno == logging.WARNING


def test_values_are_named_by_their_classes() -> None:
    assert util.map_class_to_label([[0.1, 0.2], [0.3, 0.4]]) == [
        {"0": 0.1, "1": 0.2},
        {"0": 0.3, "1": 0.4},
    ]
    labels = {"0": "a", "1": "b", "2": "a"}
    assert util.map_class_to_label([[0.5, 0.3, 0.2]], labels, [[2, 1, 0]]) == [{"a": 0.2, "b": 0.3}]
    with pytest.raises(TypeError, match="expected a list"):
        util.map_class_to_label("text")
    with pytest.raises(TypeError, match="expected a dict"):
        util.map_class_to_label([[1]], ["a"])  # type: ignore[arg-type]


def test_classes_are_those_of_the_module_itself() -> None:
    from ts.torch_handler import base_handler, image_classifier

    assert util.list_classes_from_module(image_classifier) == [image_classifier.ImageClassifier]
    assert util.list_classes_from_module(image_classifier, base_handler.BaseHandler)
    assert util.list_classes_from_module(image_classifier, Path) == []


def test_a_deprecated_function_warns() -> None:
    with pytest.warns(PendingDeprecationWarning, match="len goes in 2.0; use size instead"):
        assert util.deprecated("2.0", "size")(len)("abc") == 3


def test_the_prediction_exception_is_the_one_that_the_loop_knows() -> None:
    assert util.PredictionException is Ours
    assert str(util.PredictionException("no", 513)) == "no : 513"


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("pathlib.Path", None), ("Path", "pathlib"), ("util.PT2Backend", "ts.utils")],
)
def test_a_class_is_found_by_name(name: str, prefix: str | None) -> None:
    assert import_class(name, prefix).__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize("name", ["", "Path", "pathlib.NoSuch", "no_such_module.Path"])
def test_a_class_that_there_is_not_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError):
        import_class(name)


def test_parts_of_an_answer_go_to_the_clients(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    context = make_context(requests=2)
    context.stream = sent.append
    send_intermediate_predict_response(["a", "b"], context.request_ids, "", 200, context)
    monkeypatch.setenv("LOCAL_RANK", "1")
    send_intermediate_predict_response(["c", "d"], context.request_ids, "", 200, context)
    assert sent == [["a", "b"]]


def test_the_mock_context_is_enough_for_a_handler(linear: Any, tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("handler: {profile: true}\n", encoding="utf-8")
    context = MockContext(
        "linear.pth", str(tmp_path), "linear_net.py", None, "m", "model-config.yaml"
    )
    handler = import_place(BUILT_IN["base_handler"])()
    handler.initialize(context)
    assert handler.handle([[1.0, 1.0, 1.0]], context) == [[6.5, -1.0]]
    assert "HandlerTime" in [metric.name for metric in context.metrics.store]


FUNCTION = """
state = []

def entry(data, context):
    if data is None:
        state.append(context.model_name)
        return None
    return [{"state": state, "body": row["body"], "x": context.get_request_header(0, "X")}
            for row in data]
"""


def test_a_handler_runs_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handler.py").write_text(FUNCTION, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    loader = ModelLoaderFactory.get_model_loader()
    service = loader.load("m", str(tmp_path), "handler:entry", None, 1)
    request = {
        "requestId": b"1",
        "parameters": [{"name": "body", "value": "hi", "contentType": "text/plain"}],
        "headers": [{"name": b"X", "value": b"y"}],
    }
    assert service.predict([request]) == [{"state": ["m"], "body": "hi", "x": "y"}]
    assert service.context.get_request_id(0) == "1"
    assert [record["name"] for record in service.context.metrics.drain()] == ["PredictionTime"]
    wrapped = loader.load("m", str(tmp_path), "handler:entry", envelope="body")
    with pytest.raises(TypeError):
        wrapped.predict([request])
    with pytest.raises(ValueError, match="Expected only one class in custom service code"):
        loader.load("m", str(tmp_path), "handler:absent")
    with pytest.raises(ValueError, match="Received invalid inputs"):
        service.retrieve_data_for_inference(None)
