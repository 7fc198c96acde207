"""Two batches in flight: whatever a device's streams do, each gets its own answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers import (
    BUILT_IN,
    BadInput,
    BaseHandler,
    Context,
    ImageClassifier,
    TextHandler,
)
from modelyard.handlers.backends import Artifact, Output
from modelyard.handlers.base import Inputs
from modelyard.handlers.cuda import (
    Graphs,
    Launched,
    NoGraphs,
    Overlap,
    can_overlap,
    open_overlap,
    record_graphs,
    sizes_of_graphs,
)
from tests.lazy_device import LazyDevice

MakeContext = Callable[..., Context]
BATCH = Dim("batch", 1, 8)
ROW = TensorSpec("x", "float32", (BATCH, 3))
PAIR = (ROW, TensorSpec("y", "int64", (BATCH, 2)))


def double(x: Tensor) -> Tensor:
    return 2 * x + x.sum(0)  # rows of zeros beside its own change nothing


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x - 1, (y + 1).flip(1)


def artifact(
    run: Callable[..., Any] = double,
    inputs: Sequence[TensorSpec] = (ROW,),
    format: str = "pt2",
    device: str = "cpu",
) -> Artifact:
    return Artifact(format, run, inputs, torch.device(device))


def handler(model: Artifact, kind: type[BaseHandler] = BaseHandler) -> BaseHandler:
    built = kind()
    built.context = Context("m", ".", None, 8)
    built.model, built.inputs = model, model.inputs
    built.device = model.device
    return built


def rows(values: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"body": bytearray(json.dumps(value).encode())} for value in values]


def context_of(count: int) -> Context:
    context = Context("m", ".", None, 8)
    context.reset([f"request-{at}" for at in range(count)])
    return context


# -- orders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", [artifact(), artifact(both, PAIR)], ids=["one", "two"])
def test_every_order_of_the_streams_gives_each_batch_its_own_answers(
    model: Artifact, graphs: bool
) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        device = LazyDevice(seed)
        mine = handler(model)
        overlap = (
            open_overlap(mine, mine.context, device)
            if graphs
            else Overlap(mine, device, mine.model)
        )
        flights: list[tuple[Launched, list[Any]]] = []
        for _ in range(12):
            data = rows([_value(model, chance) for _ in range(chance.randint(1, 8))])
            expected = mine.handle(data, context_of(len(data)))
            flights.append((overlap.launch(data, context_of(len(data))), expected))
            device.run_some()
            while len(flights) == 2 or (flights and chance.random() < 0.5):
                launched, wanted = flights.pop(chance.randrange(len(flights)))
                assert launched.result() == wanted


def _value(model: Artifact, chance: random.Random) -> Any:
    x = [float(chance.randrange(100)) for _ in range(3)]
    return x if len(model.inputs) == 1 else {"x": x, "y": [chance.randrange(100), 7]}


@pytest.mark.parametrize("name", ["digits.pt2", "digits.pt"])
def test_a_real_network_answers_as_the_handler_does(
    make_context: MakeContext, scans: list[bytes], name: str
) -> None:
    mine = ImageClassifier()
    mine.initialize(make_context(name, twin=None))
    overlap = open_overlap(mine, mine.context, LazyDevice(1))
    for count in (1, 3, 8, 5):
        data = [{"body": bytearray(scan)} for scan in scans[:count]]
        found = overlap.launch(data, context_of(count)).result()
        for one, other in zip(found, mine.handle(data, context_of(count)), strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_memory_is_taken_once() -> None:
    device = LazyDevice()
    overlap = open_overlap(handler(artifact()), context_of(1), device)
    taken = device.allocations
    assert taken == 1 + 2 * 3  # the graphs' input, and three blocks of each slot
    for count in (1, 8, 5):
        overlap.launch(rows([[1, 2, 3]] * count), context_of(count)).result()
    assert device.allocations == taken


def test_a_batch_is_done_when_its_outputs_are_there() -> None:
    device = LazyDevice()
    launched = Overlap(handler(artifact()), device, double).launch(rows([[1, 2, 3]]), context_of(1))
    assert not launched.is_done()
    device.synchronize()
    assert launched.is_done()


# -- failures ----------------------------------------------------------------------------------


class Fails(BaseHandler):
    def postprocess(self, outputs: Output) -> list[Any]:
        if self.context.get_request_id(0) == "bad":
            raise ZeroDivisionError
        return super().postprocess(outputs)


@pytest.mark.parametrize("where", ["preprocess", "model", "postprocess"])
def test_a_batch_that_fails_leaves_its_slot_to_others(where: str) -> None:
    def run(x: Tensor) -> Tensor:
        if len(x) == 2:
            raise ZeroDivisionError
        return double(x)

    mine = handler(artifact(run), Fails)
    overlap = Overlap(mine, LazyDevice(), mine.model)
    row = [1, 2, 3]
    cases: dict[str, list[Any]] = {
        "preprocess": ["no row"],
        "model": [row, row],
        "postprocess": [row],
    }
    bad = cases[where]
    for _ in range(5):
        context = context_of(len(bad))
        if where == "postprocess":
            context.reset(["bad"])
        first = overlap.launch(rows([row]), context_of(1))
        with pytest.raises((BadInput, ZeroDivisionError)):
            overlap.launch(rows(bad), context).result()
        assert first.result() == [[3, 6, 9]]


def test_the_context_is_the_batchs_own_in_both_halves() -> None:
    read: list[str | None] = []

    class Tells(BaseHandler):
        def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
            read.append(self.context.get_request_id(0))
            return super().preprocess(data)

        def postprocess(self, outputs: Output) -> list[Any]:
            return [self.context.get_request_id(0)]

    mine = handler(artifact(), Tells)
    overlap = Overlap(mine, LazyDevice(), mine.model)
    flights = []
    for name in ("one", "two"):
        context = Context("m", ".", None, 8)
        context.reset([name])
        flights.append(overlap.launch(rows([[1, 2, 3]]), context))
    assert [flight.result() for flight in flights] == [["one"], ["two"]]
    assert read == ["one", "two"]


# -- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_sizes_are_powers_of_two_and_the_batch_size(
    batch_size: int, sizes: tuple[int, ...]
) -> None:
    assert sizes_of_graphs(batch_size) == sizes


class Seen:
    """A model that remembers what batches it was run with."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.batches.append(x.clone())
        return double(x)


def graphs_of(run: Callable[..., Any], inputs: Sequence[TensorSpec] = (ROW,)) -> Graphs:
    return record_graphs(artifact(run, inputs), inputs, 8, 1e-4, LazyDevice())


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_batch_is_padded_with_zeros_to_the_next_size(count: int, size: int) -> None:
    seen = Seen()
    graphs = graphs_of(seen)
    with torch.inference_mode():
        graphs(torch.full((8, 3), 99.0))  # what it leaves behind is nobody else's
        seen.batches.clear()
        batch = torch.rand(count, 3)
        found = graphs(batch)
    assert isinstance(found, Tensor)
    assert torch.equal(found, double(batch))
    (ran,) = seen.batches
    assert torch.equal(ran[:count], batch)
    assert ran.shape == (size, 3)
    assert not ran[count:].any()


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.rand(9, 3),),
        (torch.rand(0, 3),),
        (torch.rand(2, 4),),
        (torch.rand(2, 3).double(),),
        (torch.rand(2, 3), torch.rand(2, 3)),
        (),
    ],
    ids=["rows", "empty", "shape", "dtype", "two", "none"],
)
def test_what_fits_no_graph_is_the_artifacts_to_judge(tensors: tuple[Tensor, ...]) -> None:
    plain = artifact(double, (TensorSpec("x"),))
    graphs = record_graphs(plain, (ROW,), 8, 1e-4, LazyDevice())
    try:
        expected = plain(*tensors)
    except Exception as error:
        with pytest.raises(type(error)):
            graphs(*tensors)
    else:
        assert torch.equal(torch.as_tensor(graphs(*tensors)), torch.as_tensor(expected))


class Forgetful(LazyDevice):
    """Its graphs give what they gave when they were recorded."""

    def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        outputs = call()
        return (lambda: None), outputs


class Unable(LazyDevice):
    def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


LENGTH = TensorSpec("x", "float32", (BATCH, Dim("length")))


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        (artifact(inputs=(LENGTH,)), LazyDevice(), "a shape varies"),
        (artifact(inputs=(TensorSpec("x"),)), LazyDevice(), "is unknown"),
        (artifact(format="aoti"), LazyDevice(), "aoti is launched as it is"),
        (artifact(lambda x: x.sum()), LazyDevice(), "do not have a row for each"),
        (artifact(lambda x: x[:1]), LazyDevice(), "do not have a row for each"),
        (artifact(), Forgetful(), "output 0 of a batch of 8 is not what the model gives"),
        (artifact(lambda x: x.argmax(1)), Forgetful(), "is not what the model gives"),
        (artifact(), Unable(), "RuntimeError: operation not permitted when stream is capturing$"),
        (artifact(inputs=(TensorSpec("x", "float32", (16, 3)),)), LazyDevice(), "no batch of"),
    ],
    ids=["length", "unknown", "aoti", "sum", "first", "wrong", "index", "unable", "fixed"],
)
def test_what_cannot_be_recorded_runs_as_it_is(
    model: Artifact, device: LazyDevice, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoGraphs, match=reason):
        record_graphs(model, model.inputs, 8, 1e-4, device)
    with caplog.at_level("INFO"):
        overlap = open_overlap(handler(model), context_of(1), device)
    assert "the model runs without CUDA graphs: " in caplog.text
    if model.accepts([torch.zeros(2, 3)]) and model.format == "pt2":
        data = rows([[1, 2, 3], [4, 5, 7]])
        found = overlap.launch(data, context_of(2))
        assert found.result() == handler(model).handle(data, context_of(2))


def test_a_fixed_batch_has_one_graph() -> None:
    sizes: list[int] = []
    fixed = TensorSpec("x", "float32", (8, 3))

    class Counts(LazyDevice):
        def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
            replay, outputs = super().record_graph(call)
            sizes.append(len(outputs))
            return replay, outputs

    record_graphs(artifact(inputs=(fixed,)), (fixed,), 8, 1e-4, Counts())
    assert sizes == [8]


def test_a_batch_that_does_not_fit_refuses_the_model() -> None:
    def run(x: Tensor) -> Tensor:
        if len(x) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return double(x)

    for format in ("pt2", "aoti"):
        with pytest.raises(torch.OutOfMemoryError):
            open_overlap(handler(artifact(run, format=format)), context_of(1), LazyDevice())


def test_the_configuration_says_whether_graphs_are_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = handler(artifact())
    mine.context.model_yaml_config = {"handler": {"cuda_graphs": False}}
    overlap = open_overlap(
        mine, mine.context, Forgetful()
    )  # its graphs would be found out, and told of
    assert not caplog.records
    assert overlap.launch(rows([[1, 2, 3]]), context_of(1)).result() == [[3, 6, 9]]


def test_graphs_may_differ_by_what_the_certificate_allows(tmp_path: Path) -> None:
    class Rough(LazyDevice):
        def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
            replay, outputs = super().record_graph(call)
            assert isinstance(outputs, Tensor)

            def rough() -> None:
                replay()
                outputs.add_(0.01)

            return rough, outputs

    mine = handler(artifact())
    manifest = {"modelyard": {"report": "report.json"}}
    for tolerance, off in ((0.1, 0.01), (1e-3, 0.0)):
        mine.context = Context("m", str(tmp_path), manifest, 8)
        (tmp_path / "report.json").write_text(json.dumps({"parity": {"tolerance": tolerance}}))
        overlap = open_overlap(mine, mine.context, Rough())
        (answer,) = overlap.launch(rows([[1, 2, 3]]), context_of(1)).result()
        assert answer == pytest.approx([3 + off, 6 + off, 9 + off], abs=1e-5)


# -- which handlers ----------------------------------------------------------------------------


class Starts(ImageClassifier):
    def initialize(self, context: Context) -> None:
        super().initialize(context)


class Answers(TextHandler):
    def postprocess(self, outputs: Output) -> list[Any]:
        return [len(encoding) for encoding in self.encodings]


class AnswersAlone(BaseHandler):
    overlaps = True

    def postprocess(self, outputs: Output) -> list[Any]:
        return ["mine"]


class Infers(AnswersAlone):
    def inference(self, inputs: Any, *args: Any, **kwargs: Any) -> Output:
        return super().inference(inputs)


def replaced() -> BaseHandler:
    mine = handler(artifact(device="cuda:0"))
    mine.handle = lambda data, context: []  # type: ignore[method-assign]
    return mine


def with_model(model: Any) -> BaseHandler:
    mine = handler(artifact())
    mine.model = model
    return mine


@pytest.mark.parametrize(
    ("target", "can"),
    [
        *((handler(artifact(device="cuda:0"), kind), True) for kind in BUILT_IN.values()),
        (handler(artifact(device="cuda:0"), Starts), True),
        (handler(artifact(device="cuda:0"), Answers), False),
        (handler(artifact(device="cuda:0"), AnswersAlone), True),
        (handler(artifact(device="cuda:0"), Infers), False),
        (replaced(), False),
        (with_model(torch.nn.Identity()), False),
        (handler(artifact()), False),
        (BaseHandler(), False),
        (lambda data, context: [], False),
    ],
    ids=[
        *BUILT_IN,
        "starts",
        "answers",
        "told",
        "infers",
        "replaced",
        "module",
        "cpu",
        "none",
        "function",
    ],
)
def test_only_handlers_that_keep_nothing_between_two_steps_overlap(
    target: object, can: bool
) -> None:
    assert can_overlap(target, BUILT_IN.values()) is can
