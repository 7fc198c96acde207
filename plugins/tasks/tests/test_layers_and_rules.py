"""Grad-CAM, guided Grad-CAM and DeepLIFT beside captum's, of modules and of exported programs."""

import warnings
from typing import Any

import pytest
import torch
from captum.attr import DeepLift, GuidedGradCam, LayerAttribution, LayerGradCam
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers import BadInput, NoGradients
from modelyard.handlers.explain.explanation import Explanation, explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.models.backends import Artifact
from tests.handlers.test_explanation import subject

SPEC = TensorSpec("image", "float64", (Dim("batch", 1, 16), 2, 12, 12))


class Net(nn.Module):
    """Two convolutions with ReLUs; one works in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 4, stride=2), nn.BatchNorm2d(4))
        self.sharp = nn.ReLU(inplace=True)
        self.second, self.bend = nn.Conv2d(4, 6, 3), nn.ReLU()
        self.flat, self.out, self.tanh = nn.Flatten(), nn.Linear(54, 5), nn.Tanh()
        self.last = nn.Linear(5, 3)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 2, 12, 12) to (N, 3)."""
        inside = self.bend(self.second(self.sharp(self.first(image))))
        found: Tensor = self.last(self.tanh(self.out(self.flat(inside))))
        return found


NET = Net().double().eval().requires_grad_(False)
X = torch.randn(2, 2, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["eager", "pt2"])
def artifact(request: pytest.FixtureRequest) -> Artifact:
    module: nn.Module = NET
    if request.param == "pt2":
        batch = ({0: torch.export.Dim("batch", min=1, max=16)},)
        module = torch.export.export(NET, (X,), dynamic_shapes=batch).module()
    return Artifact(request.param, module, (SPEC,), torch.device("cpu"), module)


def explain(artifact: Artifact, *queries: dict[str, str], **known: Any) -> list[Explanation]:
    def window(sizes: torch.Size, side: int | None) -> tuple[int, ...]:
        return (sizes[0], side or 3, side or 3)

    options = [parse_options(query) for query in queries]
    model = subject(artifact, window=window, **known)
    return [each for (each,) in explain_batch(model, (X[: len(queries)],), options)]


def enlarged(maps: Tensor) -> Tensor:
    found: Tensor = LayerAttribution.interpolate(maps, (12, 12), interpolate_mode="bilinear")
    return found


@pytest.mark.parametrize("layer", ["second", "first"])  # the latter before a ReLU in place
def test_grad_cam_is_captums_enlarged(artifact: Artifact, layer: str) -> None:
    query = {"method": "layer_grad_cam", "layer": layer}
    found = explain(artifact, {**query, "target": "1"}, {**query, "target": "2"})
    maps = LayerGradCam(NET, getattr(NET, layer)).attribute(X, target=torch.tensor([1, 2]))
    for each, expected in zip(found, enlarged(maps), strict=True):
        assert each.attributions[0].shape == (1, 12, 12)
        assert torch.allclose(each.attributions[0], expected)
        assert (each.error, each.convergence_delta, each.options.layer) == (None, None, layer)


def test_guided_grad_cam_is_captums(artifact: Artifact) -> None:
    query = {"method": "guided_grad_cam", "layer": "second", "target": "1"}
    found = explain(artifact, query, query)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = GuidedGradCam(NET, NET.second).attribute(
            X.clone().requires_grad_(), target=1, interpolate_mode="bilinear"
        )
    for each, one in zip(found, expected, strict=True):
        assert torch.count_nonzero(one)
        assert torch.allclose(each.attributions[0], one)


def test_deep_lift_is_captums_and_adds_up(artifact: Artifact) -> None:
    start = torch.full((1, 2, 12, 12), 0.3, dtype=torch.float64)
    found = explain(
        artifact,
        {"method": "deep_lift", "target": "0"},
        {"method": "deep_lift", "target": "2"},
        baselines=lambda name, inputs, seed: (start,),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = DeepLift(NET).attribute(
            X.clone().requires_grad_(), baselines=start.expand_as(X), target=torch.tensor([0, 2])
        )
    for each, one in zip(found, expected, strict=True):
        assert torch.allclose(each.attributions[0], one)
        assert each.sum_attributions == pytest.approx(each.f_input - each.f_baseline)
    (contrast,) = explain(artifact, {"method": "deep_lift", "target": "0", "against": "2"})
    others = explain(artifact, *({"method": "deep_lift", "target": each} for each in "00"))
    (second,) = explain(artifact, {"method": "deep_lift", "target": "2"})
    assert torch.allclose(
        contrast.attributions[0], others[0].attributions[0] - second.attributions[0]
    )


def test_pooling_is_lifted_as_captum_does() -> None:
    """Beside a ReLU before it, where captum 0.9 loses the shares of the baseline's maxima."""
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(75, 3)
    ).double()
    model = Artifact("eager", net.eval(), (SPEC,), torch.device("cpu"), net)
    (found,) = explain(model, {"method": "deep_lift", "target": "0"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = DeepLift(net).attribute(X[:1].clone().requires_grad_(), target=0)
    assert torch.allclose(found.attributions[0], one[0])


def test_pooling_windows_that_overlap_add_up_too() -> None:
    net = nn.Sequential(nn.MaxPool2d(3, stride=1), nn.Flatten(), nn.Linear(200, 3)).double()
    model = Artifact("eager", net.eval(), (SPEC,), torch.device("cpu"), net)
    (found,) = explain(model, {"method": "deep_lift", "target": "0"})
    assert found.sum_attributions == pytest.approx(found.f_input - found.f_baseline)


def test_maxima_of_the_baseline_count_where_they_are() -> None:
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(12), nn.Flatten()).double()
    model = Artifact("eager", net.eval(), (SPEC,), torch.device("cpu"), net)
    start = torch.zeros(1, 2, 12, 12, dtype=torch.float64)
    start[0, 0, 3, 7] = 9.0
    (found,) = explain(
        model, {"method": "deep_lift", "target": "0"}, baselines=lambda name, inputs, seed: (start,)
    )
    most = float(X[0, 0].max())
    assert 0 < most < 9
    expected = torch.zeros_like(X[0])
    expected[0, 3, 7] = most - 9
    assert torch.allclose(found.attributions[0], expected)


@pytest.mark.parametrize("method", ["layer_grad_cam", "guided_grad_cam", "deep_lift"])
def test_they_are_checked_and_measured_like_others(artifact: Artifact, method: str) -> None:
    layer = {} if method == "deep_lift" else {"layer": "second"}
    (found,) = explain(artifact, {"method": method, "check": "true", "quality": "true", **layer})
    assert found.measures["check"]["features"] == 144
    quality = found.measures["quality"]
    assert (quality["infidelity"] is None) == (method != "deep_lift")
    assert quality["sensitivity"] > 0


class Odd(nn.Module):
    """Steps that have no rule."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, image: Tensor) -> Tensor:
        """(N, 2, 12, 12) to (N, 2)."""
        flat = image.flatten(1)
        if self.kind == "product":
            return flat[:, :2] * flat[:, 2:4]
        if self.kind == "softmax":
            return flat.softmax(1)[:, :2]
        if self.kind == "turned":  # the batch is not the first dimension where it bends
            return flat.t().contiguous().relu().t().sum(1, keepdim=True)
        raise AssertionError(self.kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("product", r"no rule for \w+ of two tensors that depend on the input"),
        ("softmax", "no rule for softmax"),
        ("turned", "misses the sum of its values by"),
    ],
)
def test_a_step_without_a_rule_is_refused(kind: str, message: str) -> None:
    net = Odd(kind)
    model = Artifact("eager", net, (SPEC,), torch.device("cpu"), net)
    with pytest.raises(NoGradients, match=message):
        explain(model, {"method": "deep_lift", "target": "0"})


def test_what_cannot_be_looked_at_is_refused(artifact: Artifact) -> None:
    with pytest.raises(BadInput, match="layer is not given; layer_grad_cam needs one"):
        explain(artifact, {"method": "layer_grad_cam"})
    with pytest.raises(BadInput, match=r"the layer gives \[5\] for inputs of \[2, 12, 12\]"):
        explain(artifact, {"method": "layer_grad_cam", "layer": "out"})
    with pytest.raises(NoGradients, match="no rule for softmax"):
        explain(artifact, {"method": "deep_lift", "output": "probability"})
    smooth = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Flatten()).double().eval()
    model = Artifact("eager", smooth, (SPEC,), torch.device("cpu"), smooth)
    with pytest.raises(NoGradients, match="guides gradients through ReLUs, and this model has no"):
        explain(model, {"method": "guided_grad_cam", "layer": "0"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(smooth)
    model = Artifact("torchscript", script, (SPEC,), torch.device("cpu"), script)
    with pytest.raises(NoGradients, match="which TorchScript does not show"):
        explain(model, {"method": "deep_lift"})


def test_an_artifact_of_one_row_is_not_lifted() -> None:
    spec = TensorSpec("image", "float64", (1, 2, 12, 12))
    model = Artifact("eager", NET, (spec,), torch.device("cpu"), NET)
    with pytest.raises(NoGradients, match="deep_lift asks about 2 rows at once"):
        explain(model, {"method": "deep_lift"})
