"""TorchServe's image handlers: the values that models get, and the answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.image_segmenter import ImageSegmenter
from ts.torch_handler.object_detector import ObjectDetector
from ts.torch_handler.vision_handler import VisionHandler

from modelyard.handlers.context import Context

MakeContext = Callable[..., Context]

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def picture(mode: str = "RGB", size: tuple[int, int] = (300, 260)) -> Image.Image:
    width, height = size
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def ready(kind: type[VisionHandler], model: Any = None) -> Any:
    handler = kind()
    handler.device, handler.model = torch.device("cpu"), model
    return handler


@pytest.mark.parametrize("size", [(256, 256), (300, 260), (260, 300), (100, 77), (1000, 300)])
def test_a_classifier_gets_the_values_of_torchvisions_transforms(size: tuple[int, int]) -> None:
    """Resize(256), CenterCrop(224), ToTensor, Normalize; these formulas are torchvision's own."""
    image = picture(size=size)
    width, height = size
    short = min(size)
    resized = image.resize(
        (int(256 * width / short), int(256 * height / short)), Image.Resampling.BILINEAR
    )
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    cropped = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    expected = torch.from_numpy(cropped.copy()).permute(2, 0, 1).float().div(255)
    expected = (expected - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
    (got,) = ready(ImageClassifier).preprocess([{"body": bytearray(png(image))}])
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "row",
    [
        {"data": png(picture())},
        {"body": bytearray(png(picture()))},
        {"data": b"", "body": png(picture())},
        {"body": base64.b64encode(png(picture())).decode()},
    ],
    ids=["data", "body", "empty data", "base64"],
)
def test_a_picture_comes_in_several_ways(row: dict[str, Any]) -> None:
    handler = ready(ImageClassifier)
    expected = handler.preprocess([{"body": png(picture())}])
    assert torch.equal(handler.preprocess([row]), expected)


def test_a_nested_list_is_the_models_input() -> None:
    assert ready(ImageClassifier).preprocess([{"body": [[1, 2]]}, {"body": [[3, 4]]}]).tolist() == [
        [[1.0, 2.0]],
        [[3.0, 4.0]],
    ]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_other_pictures_become_rgb(mode: str) -> None:
    got = ready(ImageClassifier).preprocess([{"body": png(picture(mode))}])
    expected = ready(ImageClassifier).preprocess([{"body": png(picture(mode).convert("RGB"))}])
    assert torch.equal(got, expected)


def test_an_authors_own_processing_gets_the_picture_as_it_is() -> None:
    class Grey(ImageClassifier):
        image_processing = staticmethod(lambda image: torch.from_numpy(np.array(image))[None])

    assert ready(Grey).preprocess([{"body": png(picture("L", (5, 4)))}]).shape == (1, 1, 4, 5)


def test_the_likeliest_labels_are_answered_in_order() -> None:
    handler = ready(ImageClassifier)
    logits = torch.log(torch.tensor([[0.1, 0.3, 0.05, 0.25, 0.2, 0.1]]))
    handler.set_max_result_classes(3)
    (answer,) = handler.postprocess(logits)
    assert list(answer) == ["1", "3", "4"]
    assert answer["1"] == pytest.approx(0.3)
    handler.mapping = {str(index): f"label{index}" for index in range(6)}
    assert list(handler.postprocess(logits)[0]) == ["label1", "label3", "label4"]


def test_a_model_of_few_classes_answers_them_all() -> None:
    assert len(ready(ImageClassifier).postprocess(torch.zeros(1, 2))[0]) == 2


def test_a_linear_models_explanation_is_its_weights_times_the_input(
    make_context: MakeContext,
) -> None:
    """Integrated gradients of a linear model are exact, whatever the number of steps."""
    linear = nn.Linear(4, 2)
    handler = ready(ImageClassifier, nn.Sequential(nn.Flatten(), linear))
    rows = [{"data": [[1.0, 2.0], [3.0, 4.0]], "target": bytearray(b"1")}]
    (answer,) = handler.handle(rows, make_context(headers={"explain": "True"}))
    expected = linear.weight[1].detach() * torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.allclose(torch.tensor(answer).flatten(), expected, atol=1e-6)


def test_an_explanation_takes_fifteen_steps_from_zero() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach())
            return x

    ready(ImageClassifier, Spy()).get_insights(torch.ones(1, 3), None, 2)
    assert seen[-1].shape == (15, 3)
    assert 0 < seen[-1].min() < 0.01


@pytest.mark.parametrize("limit", [True, False])
def test_only_the_server_lifts_the_limit_on_pixels(
    make_context: MakeContext, linear: nn.Linear, monkeypatch: pytest.MonkeyPatch, limit: bool
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1234)
    context = make_context(modelFile="linear_net.py")
    context.system_properties["limit_max_image_pixels"] = limit
    ImageClassifier().initialize(context)
    assert (1234 if limit else None) == Image.MAX_IMAGE_PIXELS


def test_a_detector_answers_what_it_is_sure_of() -> None:
    handler = ready(ObjectDetector)
    handler.mapping = {"1": "person", "2": "car"}
    found = {
        "boxes": torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [0.0, 0.0, 1.0, 1.0]]),
        "labels": torch.tensor([2, 1, 1]),
        "scores": torch.tensor([0.75, 0.5, 0.25]),
    }
    nothing = {key: value[:0] for key, value in found.items()}
    assert handler.postprocess([found, nothing]) == [
        [
            {"car": [1.0, 2.0, 3.0, 4.0], "score": 0.75},
            {"person": [5.0, 6.0, 7.0, 8.0], "score": 0.5},
        ],
        [],
    ]


def test_a_detector_gets_the_picture_in_its_own_size() -> None:
    image = picture(size=(6, 5))
    got = ready(ObjectDetector).preprocess([{"body": png(image)}])
    assert torch.equal(got[0], torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255)


def test_a_segmenter_answers_class_and_probability_of_each_pixel() -> None:
    logits = torch.log(torch.tensor([0.25, 0.75])).view(1, 2, 1, 1).expand(1, 2, 2, 3)
    (answer,) = ready(ImageSegmenter).postprocess({"out": logits})
    assert torch.allclose(torch.tensor(answer), torch.tensor([1.0, 0.75]).expand(2, 3, 2))
