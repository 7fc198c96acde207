import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.handlers import BadInput, BaseHandler, Context, LoadError, NoGradients
from modelyard.handlers.models.folder import load_label_mapping
from tests.handlers.folders import ask, explain, load, save_program

MakeContext = Callable[..., Context]

IMAGE = [[[0.5] * 8] * 8]


class Doubler(BaseHandler):
    def postprocess(self, outputs: Any) -> list[Any]:
        return [2 * row[0] for row in super().postprocess(outputs)]


class SumAndProduct(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left.sum(1) + right.sum(1), left * right


@pytest.fixture
def pair_folder(tmp_path: Path) -> Path:
    """An archive's folder whose model takes `left` and `right` and gives `sum` and `product`."""
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    example = (torch.rand(3, 2), torch.rand(3, 2))
    program = torch.export.export(SumAndProduct(), example, dynamic_shapes=(batch, batch))
    torch.export.save(program, tmp_path / "pair.pt2")
    return tmp_path


PAIR_SIGNATURE = {
    "inputs": [
        {"name": "left", "dtype": "float32", "shape": ["batch", 2]},
        {"name": "right", "dtype": "float32", "shape": ["batch", 2]},
    ],
    "outputs": [
        {"name": "sum", "dtype": "float32", "shape": ["batch"]},
        {"name": "product", "dtype": "float32", "shape": ["batch", 2]},
    ],
    "dims": {"batch": {"min": 1, "max": 8}},
}


def initialized(handler: BaseHandler, context: Context) -> BaseHandler:
    handler.initialize(context)
    assert handler.initialized
    return handler


@pytest.mark.parametrize("artifact", ["digits.onnx", "digits.pt2", "digits.pt"])
def test_json_numbers_in_and_the_checkpoints_outputs_out(
    make_context: MakeContext, digits_net: nn.Module, artifact: str
) -> None:
    context = make_context(artifact, requests=2)
    handler = initialized(BaseHandler(), context)
    second = torch.rand(1, 8, 8)
    data: list[dict[str, Any]] = [
        {"body": IMAGE},
        {"body": bytearray(json.dumps(second.tolist()), "utf-8")},
    ]
    answers = handler.handle(data, context)
    expected = digits_net(torch.stack([torch.tensor(IMAGE), second])).tolist()
    assert answers[0] == pytest.approx(expected[0], abs=1e-4)
    assert answers[1] == pytest.approx(expected[1], abs=1e-4)


def test_smallest_handler_changes_one_step(make_context: MakeContext) -> None:
    context = make_context()
    plain = initialized(BaseHandler(), context).handle([{"body": IMAGE}], context)
    doubled = initialized(Doubler(), context).handle([{"body": IMAGE}], context)
    assert doubled == [2 * plain[0][0]]


def test_torchserves_attributes_are_set(make_context: MakeContext, digits_folder: Path) -> None:
    handler = initialized(BaseHandler(), make_context())
    assert handler.device == torch.device("cpu")
    assert handler.map_location == "cpu"
    assert handler.model_pt_path == str(digits_folder / "digits.onnx")
    assert handler.manifest["model"]["modelName"] == "digits"
    assert handler.mapping is not None and handler.mapping["7"] == "7"


def test_several_inputs_and_outputs_go_by_name(
    make_context: MakeContext, pair_folder: Path
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    body = {"right": [3, 4], "left": [1, 2]}
    assert (
        handler.handle([{"body": body}, {"body": body}], context)
        == [{"sum": 10.0, "product": [3.0, 8.0]}] * 2
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"left": [1, 2]}, "the body holds the entries left; expected .* left, right"),
        ([1, 2], "the body holds no object; expected .* exactly: left, right"),
        ({"left": [1, 2], "right": [1]}, '"right" holds numbers of shape'),
    ],
    ids=["missing", "no object", "shape"],
)
def test_inputs_that_are_missing_or_wrong_are_named(
    make_context: MakeContext, pair_folder: Path, body: object, message: str
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    with pytest.raises(BadInput, match=message):
        handler.handle([{"body": body}], context)


def test_log_not_client_learns_which_request_of_a_batch_was_bad(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(requests=3)
    handler = initialized(BaseHandler(), context)
    data: list[dict[str, Any]] = [{"body": IMAGE}, {"body": IMAGE}, {"body": [[1]]}]
    with caplog.at_level(logging.INFO, "modelyard.handlers"), pytest.raises(BadInput) as error:
        handler.handle(data, context)
    assert "request id-2 (index 2 of its batch)" in caplog.text
    assert "id-2" not in str(error.value)


def test_without_a_signature_the_artifact_says_what_it_takes(
    make_context: MakeContext,
) -> None:
    context = make_context("digits.pt2", None, signature=None)
    handler = initialized(BaseHandler(), context)
    with pytest.raises(BadInput, match=r'"image" holds .* shape \[1, 8, 8\]'):
        handler.handle([{"body": [[1]]}], context)


def test_batch_size_beyond_the_proven_range_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(LoadError, match=r"batchSize is 9, .*batch=1\.\.8.* set batchSize"):
        BaseHandler().initialize(make_context(batch_size=9))


def test_manifest_without_an_artifact_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(LoadError, match="the manifest names no artifact"):
        BaseHandler().initialize(make_context(serializedFile=None))


def test_artifact_that_the_archive_does_not_hold_is_named(make_context: MakeContext) -> None:
    context = make_context("gone.pt2", signature=None)
    with pytest.raises(LoadError, match=r"the manifest names gone\.pt2"):
        BaseHandler().initialize(context)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "{"], ids=["empty", "list", "no format", "cut"]
)
def test_report_that_cannot_be_read_is_named(
    make_context: MakeContext, digits_folder: Path, tmp_path: Path, content: str
) -> None:
    shutil.copy(digits_folder / "digits.pt2", tmp_path)
    (tmp_path / "digits.pt2.report.json").write_text(content)
    with pytest.raises(LoadError, match=r"digits\.pt2\.report\.json cannot be read"):
        BaseHandler().initialize(make_context("digits.pt2", None, folder=tmp_path))


def test_signature_that_cannot_be_read_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(LoadError, match="the manifest's signature cannot be read"):
        BaseHandler().initialize(make_context(signature={"inputs": [{"name": "x"}]}))


def test_settings_of_a_handler_that_are_not_entries_are_refused(
    make_context: MakeContext,
) -> None:
    with pytest.raises(LoadError, match=r"handler is 'text' in .*; expected entries"):
        BaseHandler().initialize(make_context(config={"handler": "text"}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"0": "cat"}, {"0": "cat"}),
        ({"0": ["n02123045", "tabby"]}, {"0": "tabby"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
    ],
    ids=["names", "lists", "object type names"],
)
def test_label_mapping_has_torchserves_three_forms(
    tmp_path: Path, content: object, expected: dict[str, str]
) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    assert load_label_mapping(tmp_path) == expected


def test_labels_are_those_of_a_hugging_face_folder_where_no_others_are_packed(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"id2label": {"0": "ham", "1": "spam"}}')
    assert load_label_mapping(tmp_path) == {"0": "ham", "1": "spam"}
    (tmp_path / "index_to_name.json").write_text('{"0": "good"}')
    assert load_label_mapping(tmp_path) == {"0": "good"}


def test_archive_without_labels_names_outputs_by_index(tmp_path: Path) -> None:
    assert load_label_mapping(tmp_path) is None
    assert BaseHandler().label(3) == "3"


@pytest.mark.parametrize("content", ["", "[1]"], ids=["empty", "list"])
def test_label_mapping_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(content)
    with pytest.raises(LoadError, match=r"index_to_name\.json"):
        load_label_mapping(tmp_path)


def test_numbers_can_be_explained(make_context: MakeContext) -> None:
    context = make_context("digits.onnx", "digits.pt2")
    handler = initialized(BaseHandler(), context)
    (answer,) = handler.explain([{"body": IMAGE}], context)
    assert answer["shape"] == [1, 8, 8]
    assert answer["tolerance_met"]


def test_numbers_are_drawn_as_bars(make_context: MakeContext) -> None:
    context = make_context()
    handler = initialized(BaseHandler(), context)
    image = [[[0.0] * 8 for _ in range(8)]]
    image[0][3][5] = 0.5
    context.reset(["a"], queries=[{"format": "html", "n_steps": "30", "target": "3"}])
    (page,) = handler.explain([{"body": image}], context)
    text = page.decode()
    assert "image[0,3,5] <b>0.5</b>" in text
    assert "this input" in text and "baseline zero" in text
    context.reset(["a"], queries=[{"format": "png", "n_steps": "30", "target": "3"}])
    (png,) = handler.explain([{"body": image}], context)
    assert context.get_response_content_type(0) == "image/png"
    assert png.startswith(b"\x89PNG")
    context.reset(["a"], queries=[{"format": "overlay"}])
    with pytest.raises(BadInput, match='format is "overlay"; expected one of json, png, html, npy'):
        handler.explain([{"body": IMAGE}], context)


def test_numbers_have_no_black_or_white(make_context: MakeContext) -> None:
    context = make_context()
    handler = initialized(BaseHandler(), context)
    context.reset(["a"], queries=[{"baseline": "white"}])
    with pytest.raises(BadInput, match='baseline is "white"; expected zero'):
        handler.explain([{"body": IMAGE}], context)


@pytest.mark.parametrize("twin", [None, "digits.onnx"], ids=["no twin", "onnx as twin"])
def test_onnx_without_a_differentiable_twin_cannot_be_explained(
    make_context: MakeContext, twin: str | None
) -> None:
    context = make_context("digits.onnx", twin)
    handler = initialized(BaseHandler(), context)
    assert handler.handle([{"body": IMAGE}], context)
    with pytest.raises(NoGradients, match="--explain-with"):
        handler.explain([{"body": IMAGE}], context)


@pytest.mark.parametrize("artifact", ["digits.pt2", "digits.pt"])
def test_differentiable_artifact_explains_itself(make_context: MakeContext, artifact: str) -> None:
    handler = initialized(BaseHandler(), make_context(artifact, artifact))
    assert handler.explainer is handler.model


def test_all_float_inputs_of_a_model_are_explained_at_once(
    make_context: MakeContext, pair_folder: Path
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    (answer,) = handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)
    assert answer["attributions"] == {"left": [1.0, 2.0], "right": [3.0, 4.0]}
    assert answer["shape"] == {"left": [2], "right": [2]}
    assert (answer["f_input"], answer["f_baseline"]) == (10.0, 0.0)


def test_baseline_from_a_file_holds_what_a_body_holds(
    make_context: MakeContext, pair_folder: Path
) -> None:
    (pair_folder / "start.json").write_text('[{"left": [1, 1], "right": [0, 4]}]')
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    context.reset(["a"], queries=[{"baseline": "file:start.json"}])
    (answer,) = handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)
    assert answer["attributions"] == {"left": [0.0, 1.0], "right": [3.0, 0.0]}
    assert (answer["baseline"], answer["f_baseline"]) == ("file:start.json", 6.0)


@pytest.mark.parametrize("name", ["nothing.json", "../pair.pt2", ".", "/etc/passwd"])
def test_baseline_outside_the_archive_is_refused(
    make_context: MakeContext, pair_folder: Path, name: str
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    context.reset(["a"], queries=[{"baseline": f"file:{name}"}])
    with pytest.raises(BadInput, match="which the archive does not hold"):
        handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)


def test_answer_names_the_archive_that_gave_it(
    make_context: MakeContext, pair_folder: Path
) -> None:
    (pair_folder / "MAR-INF").mkdir()
    (pair_folder / "MAR-INF" / "MANIFEST.json").write_bytes(b"{}")
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    (answer,) = handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)
    # printf '{}' | sha256sum
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert answer["archive_digest"] == digest


def test_work_ends_when_the_context_says_that_nobody_waits(
    make_context: MakeContext, pair_folder: Path
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)

    def end() -> None:
        raise TimeoutError

    context.cancellation = end
    with pytest.raises(TimeoutError):
        handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)


@pytest.mark.parametrize("details", [{}, {"quantize": "int8-dynamic"}], ids=["fp32", "int8"])
@pytest.mark.parametrize("artifact", ["digits.onnx", "digits.pt2"])
def test_artifact_and_twin_may_be_as_far_apart_as_their_reports_allow(
    make_context: MakeContext,
    digits_folder: Path,
    tmp_path: Path,
    artifact: str,
    details: dict[str, str],
) -> None:
    shutil.copytree(digits_folder, tmp_path, dirs_exist_ok=True)
    for name in ("onnx", "pt2"):
        path = tmp_path / f"digits.{name}.report.json"
        report = json.loads(path.read_text())
        path.write_text(json.dumps(report | {"details": details}))
    handler = initialized(BaseHandler(), make_context(artifact, folder=tmp_path))
    if artifact == "digits.pt2":
        assert handler.agreement is None
    else:
        assert handler.agreement is not None
        assert handler.agreement.tolerance == pytest.approx(2e-4, rel=1e-3)
        assert handler.agreement.is_quantized == bool(details)


def test_baseline_and_options_of_the_body_are_those_of_the_query(
    make_context: MakeContext,
) -> None:
    context = make_context("digits.pt2", None)
    handler = initialized(BaseHandler(), context)
    body = {"data": IMAGE, "explain": {"target": 3, "n_steps": 4}}
    (answer,) = handler.explain([{"body": body}], context)
    assert (answer["target"], answer["n_steps"]) == (3, 4)


@pytest.mark.parametrize("baseline", ["black", "blur", "pad"])
def test_numbers_have_no_baseline_of_pictures(make_context: MakeContext, baseline: str) -> None:
    context = make_context("digits.pt2", None)
    context.reset(["a"], queries=[{"baseline": baseline}])
    with pytest.raises(BadInput, match="expected zero or file:NAME for this model"):
        initialized(BaseHandler(), context).explain([{"body": IMAGE}], context)


def test_numbers_have_no_channels(make_context: MakeContext) -> None:
    context = make_context("digits.pt2", None)
    context.reset(["a"], queries=[{"aggregate": "sum"}])
    with pytest.raises(BadInput, match="aggregate is sum; expected none"):
        initialized(BaseHandler(), context).explain([{"body": IMAGE}], context)


class EagerPair(BaseHandler):
    """An author's handler that puts a module of its own in place of the artifact."""

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.model, self.explainer = SumAndProduct(), None


def test_module_of_an_author_is_explained(make_context: MakeContext, pair_folder: Path) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(EagerPair(), context)
    for _ in range(2):
        (answer,) = handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)
        assert answer["attributions"] == {"left": [1.0, 2.0], "right": [3.0, 4.0]}


def test_model_that_is_no_module_is_not_explained(
    make_context: MakeContext, pair_folder: Path
) -> None:
    context = make_context("pair.pt2", None, folder=pair_folder, signature=PAIR_SIGNATURE)
    handler = initialized(BaseHandler(), context)
    handler.model, handler.explainer = sum, None
    with pytest.raises(NoGradients, match="the handler's model is a builtin_function_or_method"):
        handler.explain([{"body": {"left": [1, 2], "right": [3, 4]}}], context)


class Graph(nn.Module):
    """Adds to every node what its neighbours hold."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return x.index_add(0, target, x.index_select(0, source))


@pytest.fixture
def graph(tmp_path: Path, make_context: MakeContext) -> Callable[..., tuple[BaseHandler, Context]]:
    """Open an archive whose inputs are not made of rows."""
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    example = (torch.rand(5, 2), torch.randint(0, 5, (2, 7)))
    program = torch.export.export(Graph(), example, dynamic_shapes=({0: nodes}, {1: edges}))
    torch.export.save(program, tmp_path / "graph.pt2")
    inputs = parse_inputs(["x:float32[nodes=3..6,2]", "edges:int64[2,edges=2..9]<nodes"])

    def open_graph(batch_size: int = 1) -> tuple[BaseHandler, Context]:
        context = make_context(
            "graph.pt2",
            None,
            folder=tmp_path,
            signature=inputs.to_json(),
            batch_size=batch_size,
        )
        return initialized(BaseHandler(), context), context

    return open_graph


NODES = [[1, 10], [2, 20], [3, 30]]


def test_a_graph_is_one_request(
    graph: Callable[..., tuple[BaseHandler, Context]],
) -> None:
    handler, context = graph()
    body = {"x": NODES, "edges": [[0, 0], [1, 2]]}
    assert handler.handle([{"body": body}], context) == [[[1, 10], [3, 30], [4, 40]]]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        pytest.param(
            {"x": NODES, "edges": [[0, 0], [1, 3]]},
            'input "edges" holds 3; expected values <nodes, which are 0 to 2 here',
            id="no such node",
        ),
        pytest.param(
            {"x": NODES, "edges": [[0, -1], [1, 0]]},
            'input "edges" holds -1; expected values <nodes, which are 0 to 2 here',
            id="negative",
        ),
        pytest.param(
            {"x": NODES[:2], "edges": [[0, 0], [1, 1]]},
            'input "x" holds numbers of shape [2, 2]; expected float32 numbers of shape '
            "[nodes=3..6, 2]",
            id="too few",
        ),
    ],
)
def test_a_graph_that_leaves_the_stated_ranges_is_refused(
    graph: Callable[..., tuple[BaseHandler, Context]], body: object, problem: str
) -> None:
    handler, context = graph()
    with pytest.raises(BadInput) as caught:
        handler.handle([{"body": body}], context)
    assert str(caught.value) == problem


def test_graphs_are_neither_stacked_nor_explained(
    graph: Callable[..., tuple[BaseHandler, Context]],
) -> None:
    with pytest.raises(LoadError, match=r"batchSize is 8, and .* cannot be stacked"):
        graph(batch_size=8)
    handler, context = graph()
    with pytest.raises(BadInput, match="explanations are of one row"):
        handler.explain([{"body": {}}], context)


class Boxes(nn.Module):
    """A row's logits, three boxes of the batch, and a number for all of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 2 * x, torch.stack([x[0], x[0], x[0]]), x.sum()


def test_outputs_without_rows_are_answered_whole(tmp_path: Path, make_context: MakeContext) -> None:
    batch = torch.export.Dim("batch", min=1, max=4)
    program = torch.export.export(Boxes(), (torch.rand(3, 2),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "boxes.pt2")
    signature = {
        **parse_inputs(["x:float32[batch=1..4,2]"]).to_json(),
        "outputs": [
            {"name": "logits", "dtype": "float32", "shape": ["batch", 2]},
            {"name": "boxes", "dtype": "float32", "shape": [3, 2]},
            {"name": "total", "dtype": "float32", "shape": []},
        ],
    }
    context = make_context("boxes.pt2", None, folder=tmp_path, signature=signature, batch_size=1)
    handler = initialized(BaseHandler(), context)
    assert handler.handle([{"body": [1, 3]}], context) == [
        {"logits": [2, 6], "boxes": [[1, 3], [1, 3], [1, 3]], "total": 4}
    ]


class Words(nn.Module):
    """Logits of token ids, of those that the mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.words(input_ids) * attention_mask.unsqueeze(2)
        return found.sum(1)


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., BaseHandler]:
    def make(values: str = "", **config: Any) -> BaseHandler:
        inputs = [f"input_ids:int64[batch=1..8,3]{values}", "attention_mask:int64[batch,3]=1..1"]
        save_program(Words(), inputs, tmp_path / "model.pt2")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load(BaseHandler, tmp_path)

    return make


WITHOUT_GRADIENTS = ["occlusion", "feature_ablation", "kernel_shap"]


@pytest.mark.parametrize("method", WITHOUT_GRADIENTS)
def test_whole_numbers_are_explained_against_zeros_or_padding(
    words: Callable[..., BaseHandler], method: str
) -> None:
    body = {"input_ids": [1, 5, 9], "attention_mask": [1, 1, 1]}
    for handler, start, name in ((words(), 0, "zero"), (words(pad_token_id=4), 4, "pad")):
        table = Words().words.weight.detach()
        answer = explain(handler, body, method=method, target="2")
        expected = (table[[1, 5, 9], 2] - table[start, 2]).tolist()
        assert answer["attributions"] == pytest.approx(expected, abs=1e-6)
        assert answer["baseline"] == name
        empty = {**body, "input_ids": [start] * 3}
        assert answer["f_baseline"] == pytest.approx(ask(handler, empty)[0][2], abs=1e-6)
        assert answer["f_input"] == pytest.approx(ask(handler, body)[0][2], abs=1e-6)


def test_whole_numbers_without_a_baseline_are_refused(words: Callable[..., BaseHandler]) -> None:
    handler = words("=1..19")
    body = {"input_ids": [1, 5, 9], "attention_mask": [1, 1, 1]}
    message = 'baseline is "zero", which input "input_ids" does not take: it holds 0; expected'
    with pytest.raises(BadInput, match=message):
        explain(handler, body, method="occlusion")
    (Path(handler.context.system_properties["model_dir"]) / "none.json").write_text(
        json.dumps([{**body, "input_ids": [2, 2, 2]}])
    )
    answer = explain(handler, body, method="occlusion", baseline="file:none.json")
    assert answer["f_baseline"] != answer["f_input"]
    with pytest.raises(BadInput, match='baseline is "pad"; expected zero or file:NAME'):
        explain(handler, body, method="occlusion", baseline="pad")
