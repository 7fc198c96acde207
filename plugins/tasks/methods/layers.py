"""Layers: integrated gradients of one, and Grad-CAM, what one looks at, as large as the input."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor, fx
from torch.nn.functional import interpolate

from modelyard.handlers.errors import BadInput, NoGradients
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    chunks,
    gradients,
    recording,
)
from modelyard.handlers.explain.attribute.cut import KEPT_CUTS, Cut, cut_graph, cut_module
from modelyard.handlers.explain.attribute.method import STEPS, Method
from modelyard.handlers.explain.attribute.path import integrated_gradients
from modelyard.handlers.models.backends import Artifact
from modelyard.plugins.tasks.methods.rules import GuidedRelus

_SHOWN_LAYERS = 20

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
"""Dimensions of a place → how maps are enlarged."""

AtLayer = Callable[[AttributionRequest], AttributionRequest]
"""Some explanations → the same of the layer's output in place of the inputs."""


def layer_grad_cam(request: AttributionRequest, *, at_layer: AtLayer) -> Attribution:
    """Return the layer's channels, each times its mean gradient, summed up and enlarged: (1, …).

    Negative values, which the paper cuts off, speak against the target.

    Args:
        request: request of one input with places, (M, C, *P).
        at_layer: takes it to the layer.

    Source: Selvaraju et al. 2016, section 3, https://arxiv.org/abs/1610.02391
    """
    return _by_chunk(request, lambda part: _enlarged(_maps(part, at_layer), part))


def guided_grad_cam(request: AttributionRequest, *, at_layer: AtLayer) -> Attribution:
    """Return the gradients that ReLUs let through, times Grad-CAM without its negative values.

    Args:
        request: request as in `layer_grad_cam`.
        at_layer: layer as in `layer_grad_cam`.

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


@lru_cache(maxsize=KEPT_CUTS)
def cut_at_layer(artifact: Artifact, name: str) -> Cut:
    """Cut a model behind a layer, named as in the checkpoint, "features.0".

    Raises:
        BadInput: no such layer; the message lists those there are.
        NoGradients: the artifact does not keep its layers.
    """
    module = artifact.module
    if isinstance(module, fx.GraphModule):
        return cut_graph(module, _layer_node(module, name))
    if module is None or isinstance(module, torch.jit.ScriptModule):
        raise NoGradients(
            f"a {artifact.format} artifact cannot be cut at a layer; archive a pt2 export with "
            "--explain-with"
        )
    layers = dict(module.named_modules())
    if name not in layers or not name:
        raise BadInput(_unknown_layer(name, [each for each in layers if each]))
    return cut_module(module, layers[name])


def _layer_node(module: fx.GraphModule, name: str) -> fx.Node:
    paths = {
        node: [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    inside = {node for node, path in paths.items() if name in path and name}
    if not inside:
        raise BadInput(_unknown_layer(name, [each for path in paths.values() for each in path]))
    last = [node for node in inside if any(user not in inside for user in node.users)]
    value = last[0].meta.get("val") if len(last) == 1 else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise BadInput(f'layer "{name}" gives no single real-valued tensor; name one inside it')
    return cast("fx.Node", last[0])


def _unknown_layer(name: str, layers: Sequence[str]) -> str:
    names = [each for each in dict.fromkeys(layers) if each and not each.startswith("_")]
    if not names:
        return f'layer is "{name}", and the model has none: all of it is one forward()'
    shown = ", ".join(names[:_SHOWN_LAYERS]) + (", …" if len(names) > _SHOWN_LAYERS else "")
    return f'layer is "{name}"; expected one of {shown}'


LAYER_INTEGRATED_GRADIENTS = Method(
    integrated_gradients, (*STEPS, "layer"), uses_baseline=True, adds_up=True, cut=cut_at_layer
)
_grad_cam = partial(
    Method, options=("layer",), multiplies=False, cut=cut_at_layer, looks_at_layer=True
)
LAYER_GRAD_CAM = _grad_cam(layer_grad_cam)
GUIDED_GRAD_CAM = _grad_cam(guided_grad_cam, watches=True)
