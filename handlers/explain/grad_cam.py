"""Grad-CAM: what a layer of a network looks at, as large as its input; and guided by ReLUs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from modelyard.handlers.errors import BadInput, NoGradients
from modelyard.handlers.explain.attribution import (
    Attribution,
    AttributionRequest,
    chunks,
    gradients,
    recording,
)
from modelyard.handlers.explain.rules import GuidedRelus

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
"""Dimensions of a place → how maps are enlarged."""

AtLayer = Callable[[AttributionRequest], AttributionRequest]
"""Some explanations → the same of the layer's output in place of the inputs."""


def layer_grad_cam(request: AttributionRequest, *, at_layer: AtLayer) -> Attribution:
    """Return the layer's channels, each times its mean gradient, summed up and enlarged: (1, …).

    Negative values, which the paper cuts off, speak against the target.

    Args:
        request: of one input with places, (M, C, *P).
        at_layer: takes it to the layer.

    Source: Selvaraju et al. 2016, section 3, https://arxiv.org/abs/1610.02391
    """
    return _by_chunk(request, lambda part: _enlarged(_maps(part, at_layer), part))


def guided_grad_cam(request: AttributionRequest, *, at_layer: AtLayer) -> Attribution:
    """Return the gradients that ReLUs let through, times Grad-CAM without its negative values.

    Args:
        request: as in `layer_grad_cam`.
        at_layer: as in `layer_grad_cam`.

    Raises:
        NoGradients: the model has no ReLU.

    Source: Selvaraju et al. 2016, section 3.1, https://arxiv.org/abs/1610.02391
    """

    def both(part: AttributionRequest) -> Tensor:
        maps = _enlarged(_maps(part, at_layer).relu(), part)
        rows = torch.arange(len(part), device=part.device)
        points = tuple(each.detach().clone().requires_grad_() for each in part.inputs)
        with GuidedRelus() as guide:
            (found,) = gradients(part.forward, points, rows)
        if not guide.count:
            raise NoGradients(
                "guided_grad_cam guides gradients through ReLUs, and this model has none; choose "
                "layer_grad_cam"
            )
        return found * maps

    return _by_chunk(request, both)


def _by_chunk(
    request: AttributionRequest, explain: Callable[[AttributionRequest], Tensor]
) -> Attribution:
    parts = []
    with recording():
        for chunk in chunks(len(request), request.chunk_rows):
            request.between_chunks()
            parts.append(explain(request.part(chunk)).detach())
    return Attribution(
        (torch.cat(parts),), torch.ones(len(request), dtype=torch.int64, device=request.device)
    )


def _maps(request: AttributionRequest, at_layer: AtLayer) -> Tensor:
    """Return the map of each explanation, (M, 1, …) with the places of the layer."""
    layer = at_layer(request)
    (values,), (inputs, *others) = layer.inputs, request.inputs
    if others or inputs.dim() not in (3, 4, 5) or values.dim() != inputs.dim():
        shapes = [list(each.shape[1:]) for each in (values, *request.inputs)]
        raise BadInput(
            f"the layer gives {shapes[0]} for inputs of {', '.join(map(str, shapes[1:]))}; "
            "Grad-CAM needs one input and a layer that both have channels and places, as a "
            "convolution has"
        )
    rows = torch.arange(len(values), device=values.device)
    point = values.detach().clone().requires_grad_()
    (slopes,) = gradients(layer.forward, (point,), rows)
    places = tuple(range(2, values.dim()))
    return (slopes.mean(places, keepdim=True) * values).sum(1, keepdim=True).detach()


def _enlarged(maps: Tensor, request: AttributionRequest) -> Tensor:
    """Give maps the places of the input: (M, 1, *P)."""
    places = tuple(request.inputs[0].shape[2:])
    return interpolate(maps, places, mode=_MODES[len(places)], align_corners=False)
