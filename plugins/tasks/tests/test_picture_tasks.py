"""Pictures as transformers' processors make inputs of them, and what becomes of the outputs."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPModel, ViTModel

from examples.tasks import pictures, shapes
from modelyard.handlers import (
    BadInput,
    ImageEncoder,
    ImageSegmenter,
    ImageText,
    LoadError,
    NoGradients,
    ObjectDetector,
)
from plugins.tasks.tests.test_text_tasks import tokenizer_of
from tests.handlers.folders import (
    Tensors,
    ask,
    copied,
    explain,
    lightened,
    load,
    loaded,
    save_program,
)
from tests.handlers.test_pictures import noise, png

PNG = {"accept": "image/png"}


# -- shapes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's trained networks, each with a program, and its picture."""
    folder = shapes.make(tmp_path_factory.mktemp("shapes"))
    inputs = [f"image:float32[batch=1..4,3,{shapes.SIDE},{shapes.SIDE}]"]
    for name, net in (("detector", shapes.Detector()), ("segmenter", shapes.Segmenter())):
        net.load_state_dict(torch.load(folder / f"{name}.pt"))
        save_program(net, inputs, folder / name / "model.pt2")
    return folder


IMAGE = {"image": {"size": [shapes.SIDE, shapes.SIDE]}}


def overlap(first: Any, second: Any) -> float:
    """Return the intersection of two boxes over their union."""
    left, top = max(first[0], second[0]), max(first[1], second[1])
    right, bottom = min(first[2], second[2]), min(first[3], second[3])
    common = max(0, right - left) * max(0, bottom - top)
    areas = sum((each[2] - each[0]) * (each[3] - each[1]) for each in (first, second))
    return float(common / (areas - common))


def test_drawn_shapes_are_found_where_they_are(drawn: Path) -> None:
    handler = load(ObjectDetector, drawn / "detector", config=IMAGE, batch_size=4)
    random = np.random.default_rng(11)
    scenes = [shapes.draw(random, (128, 96)) for _ in range(4)]
    found = 0
    for (_, boxes, _), answer in zip(
        scenes, ask(handler, *(png(picture) for picture, _, _ in scenes)), strict=True
    ):
        assert [each["score"] for each in answer] == sorted(
            (each["score"] for each in answer), reverse=True
        )
        for kind, box in boxes:
            found += any(
                each["label"] == shapes.SHAPES[kind] and overlap(box, [*each["box"].values()]) > 0.4
                for each in answer
            )
    assert found >= 0.7 * sum(len(boxes) for _, boxes, _ in scenes)


def processor_of(name: str) -> Any:
    module = __import__(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}",
                        fromlist=["x"])  # fmt: skip
    return getattr(module, f"{name}ImageProcessorPil")()


def test_boxes_are_those_of_transformers(drawn: Path) -> None:
    handler = loaded(ObjectDetector, drawn / "detector", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()
    (answer,) = ask(handler, picture)
    logits, boxes = handler.model(handler.preprocess([{"body": picture}]))
    outputs = SimpleNamespace(logits=logits, pred_boxes=boxes)
    (expected,) = processor_of("Detr").post_process_object_detection(
        outputs, threshold=0.5, target_sizes=[shapes.PICTURE[::-1]]
    )
    order = expected["scores"].argsort(descending=True)
    assert len(answer) == len(order) > 1
    assert [each["score"] for each in answer] == pytest.approx(expected["scores"][order].tolist())
    assert [each["label"] for each in answer] == [
        shapes.SHAPES[label] for label in expected["labels"][order]
    ]
    for each, box in zip(answer, expected["boxes"][order].tolist(), strict=True):
        assert [*each["box"].values()] == pytest.approx(box, abs=0.01)


def test_a_request_may_say_its_own_threshold(drawn: Path) -> None:
    handler = loaded(ObjectDetector, drawn / "detector", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()

    def count(threshold: str) -> int:
        handler.context.reset(["id"], queries=[{"threshold": threshold}])
        return len(handler.handle([{"body": picture}], handler.context)[0])

    assert count("0.01") > count("0.5") > count("0.9999") == 0
    with pytest.raises(BadInput, match='threshold is "2"; expected a number from 0 to 1'):
        count("2")


def test_boxes_are_drawn_on_the_picture_where_that_is_asked_for(drawn: Path) -> None:
    handler = loaded(ObjectDetector, drawn / "detector", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()
    (answer,) = ask(handler, picture)
    (file,) = ask(handler, picture, headers=PNG)
    assert handler.context.get_response_content_type(0) == "image/png"
    sheet, plain = Image.open(io.BytesIO(file)), Image.open(io.BytesIO(picture))
    scale = sheet.width // plain.width
    assert sheet.size == (plain.width * scale, plain.height * scale)
    box = answer[0]["box"]
    middle = int((box["xmin"] + box["xmax"]) / 2 * scale)
    edge = sheet.convert("RGB").getpixel((middle, int(box["ymax"] * scale) - 1))
    assert edge in {(128, 0, 0), (0, 128, 0)}
    handler.context.reset(["id"], queries=[{"format": "gif"}])
    with pytest.raises(BadInput, match='format is "gif"; expected one of json, png'):
        handler.handle([{"body": picture}], handler.context)


def test_a_box_is_explained_by_the_picture_around_it(drawn: Path) -> None:
    handler = loaded(ObjectDetector, drawn / "detector", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()
    found = explain(handler, picture, target="square", aggregate="sum", n_steps="10")
    assert found["label"].startswith("square in box ")
    random = np.random.default_rng(shapes.PICTURE_SEED)
    _, boxes, _ = shapes.draw(random, shapes.PICTURE)
    left, top, right, bottom = next(box for kind, box in boxes if kind == 1)
    width, height = shapes.PICTURE
    row, column = np.unravel_index(np.abs(found["attributions"]).argmax(), found["shape"])
    x, y = ((at + 0.5) / shapes.SIDE * side for at, side in ((column, width), (row, height)))
    assert left - 15 < x < right + 15
    assert top - 15 < y < bottom + 15


class Ready(nn.Module):
    """Boxes, labels and scores at once: those of a picture whose mean says which."""

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = image.mean((1, 2, 3))
        boxes = torch.tensor([[8.0, 4.0, 16.0, 16.0], [0.0, 0.0, 32.0, 8.0]])
        boxes = boxes + 0 * mean[:, None, None]
        return boxes, torch.tensor([[1, 0]]) + 0 * mean[:, None].long(), (
            torch.tensor([[0.3, 0.9]]) + 0 * mean[:, None])  # fmt: skip


def test_boxes_that_come_ready_are_in_pixels_of_the_input(tmp_path: Path) -> None:
    save_program(Ready(), ["image:float32[batch=1..4,3,32,32]"], tmp_path / "model.pt2")
    signature = json.loads((tmp_path / "model.signature").read_text())
    signature["outputs"] = [
        {"name": "boxes", "dtype": "float32", "shape": ["batch", 2, 4]},
        {"name": "labels", "dtype": "int64", "shape": ["batch", 2]},
        {"name": "scores", "dtype": "float32", "shape": ["batch", 2]},
    ]
    (tmp_path / "model.signature").write_text(json.dumps(signature))
    config = {"image": {"size": [32, 32]}, "detection": {"threshold": 0.2}}
    handler = load(ObjectDetector, tmp_path, config=config)
    first, second = ask(handler, png(noise(64, 96)))[0]
    assert (first["label"], first["score"]) == ("0", pytest.approx(0.9))
    assert first["box"] == {"xmin": 0, "ymin": 0, "xmax": 64, "ymax": 24}
    assert second["box"] == {"xmin": 16, "ymin": 12, "xmax": 32, "ymax": 48}
    with pytest.raises(NoGradients, match="no logits that could be explained"):
        explain(handler, png(noise(64, 96)))


@pytest.mark.parametrize(
    ("handler", "config", "message"),
    [
        (ObjectDetector, {"image": {"resize": 32, "crop": [32, 32]}}, "would not be seen"),
        (ImageSegmenter, {"image": {"resize": 32, "crop": [32, 32]}}, "would not be seen"),
        (ObjectDetector, {**IMAGE, "detection": {"threshold": 3}}, "threshold is 3; expected a"),
        (ObjectDetector, {**IMAGE, "detection": {"function": "max"}}, "function is 'max'"),
        (ObjectDetector, {**IMAGE, "detection": {"boxes": 1}}, "detection.boxes is unknown"),
        (ImageEncoder, {**IMAGE, "encoder": {"pooling": "max"}}, "pooling is 'max'"),
        (ImageEncoder, {**IMAGE, "encoder": {"output": "x"}}, "output is 'x'; the outputs are"),
    ],
    ids=["crop", "crop of masks", "threshold", "function", "unknown", "pooling", "output"],
)
def test_settings_that_cannot_be_meant_end_the_start(
    drawn: Path, tmp_path: Path, handler: Any, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load(handler, lightened(drawn / "detector", tmp_path), config=config)


def run_lengths(mask: np.ndarray) -> list[int]:
    """Count as COCO does, one pixel after the other."""
    counts, value = [0], False
    for pixel in mask.T.flatten().tolist():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return counts


def test_every_pixel_has_the_class_that_transformers_gives_it(drawn: Path) -> None:
    handler = loaded(ImageSegmenter, drawn / "segmenter", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()
    (answer,) = ask(handler, picture)
    logits = handler.model(handler.preprocess([{"body": picture}]))
    size = shapes.PICTURE[::-1]
    (expected,) = processor_of("Segformer").post_process_semantic_segmentation(
        SimpleNamespace(logits=logits), target_sizes=[size]
    )
    classes = expected.numpy()
    assert answer["size"] == list(size)
    assert {each["label"] for each in answer["segments"]} == {"background", *shapes.SHAPES}
    for each in answer["segments"]:
        own = classes == each["index"]
        assert (each["area"], each["counts"]) == (own.sum(), run_lengths(own))
    (file,) = ask(handler, picture, headers=PNG)
    mask = Image.open(io.BytesIO(file))
    assert mask.mode == "P"
    assert (np.asarray(mask) == classes).all()
    assert len(mask.convert("RGB").getcolors() or []) == 3


def test_drawn_shapes_are_coloured_in(drawn: Path) -> None:
    handler = loaded(ImageSegmenter, drawn / "segmenter", config=IMAGE)
    picture, _, classes = shapes.draw(np.random.default_rng(5), (128, 96))
    (file,) = ask(handler, png(picture), headers=PNG)
    assert (np.asarray(Image.open(io.BytesIO(file))) == classes).mean() > 0.95


def test_a_class_of_a_map_is_explained(drawn: Path) -> None:
    handler = loaded(ImageSegmenter, drawn / "segmenter", config=IMAGE)
    found = explain(handler, (drawn / "shapes.png").read_bytes(), target="circle", n_steps="5")
    assert (found["label"], found["shape"]) == ("circle", [3, shapes.SIDE, shapes.SIDE])
    assert found["probability"] is None, "of a mean over a picture"
    with pytest.raises(BadInput, match=r"0 to 2, or a label: background, circle, square"):
        explain(handler, (drawn / "shapes.png").read_bytes(), target="star")


def test_a_region_of_a_map_is_explained(drawn: Path) -> None:
    handler = loaded(ImageSegmenter, drawn / "segmenter", config=IMAGE)
    picture = (drawn / "shapes.png").read_bytes()
    width, height = Image.open(io.BytesIO(picture)).size
    logits = handler.score(handler.inference(handler.preprocess([{"body": picture}])))[0]
    circle = handler.label(1)
    left = explain(handler, picture, target="sum:1", n_steps="5",
                   region=f"0,0,{width // 2},{height}")  # fmt: skip
    assert left["f_input"] == pytest.approx(float(logits[1, :, : logits.shape[2] // 2].sum()))
    mean = explain(handler, picture, target=circle, region=f"0,0,{width // 2},{height}")
    assert mean["f_input"] == pytest.approx(left["f_input"] / (logits[0].numel() // 2), rel=1e-5)
    # A segment that was answered is a region as it came.
    (answer,) = ask(handler, picture)
    segment = next(each for each in answer["segments"] if each["index"] == 1)
    mask = json.dumps({"size": answer["size"], "counts": segment["counts"]})
    found = explain(handler, picture, target="sum:1", region=mask, n_steps="5")
    inside = int(found["label"].split()[-2])
    share = segment["area"] / (width * height)
    assert inside == pytest.approx(share * logits[0].numel(), abs=3)
    assert found["f_input"] > 0
    assert explain(handler, picture, target="1,2,3", n_steps="2")["label"] == (
        f"{circle} at row 2, column 3"
    )
    with pytest.raises(BadInput, match="region is 900,0,901,5; no place of the output"):
        explain(handler, picture, target=circle, region="900,0,901,5")


# -- encoders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example's transformers, each with a program of its model."""
    made = pictures.make(tmp_path_factory.mktemp("pictures"))
    vit = Tensors(ViTModel.from_pretrained(made["vit"]), ["pixel_values"],
                  ["last_hidden_state", "pooler_output"])  # fmt: skip
    save_program(vit, ["pixel_values:float32[batch=1..4,3,32,32]"], made["vit"] / "model.pt2")
    names = ["input_ids", "pixel_values", "attention_mask"]
    clip = Tensors(CLIPModel.from_pretrained(made["clip"]), names, ["logits_per_image"])
    inputs = ["input_ids:int64[texts=1..6,length=2..16]",
              "pixel_values:float32[images=1..4,3,32,32]",
              "attention_mask:int64[texts,length]"]  # fmt: skip
    save_program(clip, inputs, made["clip"] / "model.pt2")
    return made


def test_a_picture_becomes_the_vector_of_the_transformer(folders: dict[str, Path]) -> None:
    picture = noise(50, 40)
    found = transformers.models.vit.image_processing_pil_vit
    processor = found.ViTImageProcessorPil.from_pretrained(folders["vit"])
    model: Any = ViTModel.from_pretrained(folders["vit"])
    with torch.no_grad():
        outputs = model(**processor(picture, return_tensors="pt"))
    for section, expected in (
        ({}, outputs.pooler_output[0]),
        ({"output": "output_0"}, outputs.last_hidden_state[0, 0]),
        ({"output": "output_0", "pooling": "mean"}, outputs.last_hidden_state[0].mean(0)),
    ):
        folder = folders["vit"]
        signature = json.loads((folder / "model.signature").read_text())
        signature["outputs"] = [{"name": f"output_{at}", "dtype": "float32", "shape": []}
                                for at in range(2)]  # fmt: skip
        (folder / "model.signature").write_text(json.dumps(signature))
        handler = load(ImageEncoder, folder, config={"encoder": section})
        vector = torch.tensor(ask(handler, png(picture))[0])
        torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-5, rtol=0)
    with pytest.raises(BadInput, match="a vector, whose numbers mean nothing one by one"):
        explain(handler, png(picture))


def clip_body(picture: bytes, *texts: str) -> dict[str, Any]:
    return {"image": base64.b64encode(picture).decode(), "texts": list(texts)}


def test_texts_fit_a_picture_as_transformers_says(folders: dict[str, Path]) -> None:
    folder, picture = folders["clip"], noise(50, 40)
    found = __import__("transformers.models.clip.image_processing_pil_clip", fromlist=["x"])
    processor = found.CLIPImageProcessorPil.from_pretrained(folder)
    model: Any = CLIPModel.from_pretrained(folder)
    tokens = tokenizer_of(folder)(list(pictures.TEXTS), padding=True, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    with torch.no_grad():
        logits = model(**tokens, **processor(picture, return_tensors="pt")).logits_per_image
    expected = dict(zip(pictures.TEXTS, logits[0].softmax(0).tolist(), strict=True))
    handler = load(ImageText, folder)
    body = clip_body(png(picture), *pictures.TEXTS)
    (answer,) = ask(handler, body)
    assert answer == pytest.approx(expected, abs=1e-5)
    assert [*answer.values()] == sorted(answer.values(), reverse=True)
    form = {"image": bytearray(png(picture)), "texts": json.dumps(pictures.TEXTS).encode()}
    assert handler.handle([form], handler.context) == [answer]


def test_a_text_is_explained_by_the_picture(folders: dict[str, Path]) -> None:
    handler = load(ImageText, folders["clip"])
    body = clip_body(png(noise(50, 40)), *pictures.TEXTS)
    (answer,) = ask(handler, body)
    best = explain(handler, body, n_steps="20")
    assert (best["label"], best["shape"]) == (next(iter(answer)), [3, 32, 32])
    assert best["convergence_delta"] == pytest.approx(0, abs=0.05 * abs(best["f_input"]) + 0.05)
    other = explain(handler, body, n_steps="5", target="a circle")
    assert (other["label"], other["probability"]) == ("a circle", None)
    handler.is_sigmoid = True
    (answer,) = ask(handler, body)
    alone = explain(handler, body, n_steps="2", target="a circle", output="probability")
    assert alone["probability"] == alone["f_input"]
    assert alone["probability"] == pytest.approx(answer["a circle"], abs=1e-6)
    assert explain(handler, body, n_steps="2", format="png").startswith(b"\x89PNG")
    assert "50 × 40 pixels" in explain(handler, body, n_steps="2", format="html").decode()
    # Each of a batch is of its own picture.
    handler.context.reset(["a", "b"], queries=[{"n_steps": "2"}] * 2)
    rows = [{"body": body}, {"body": clip_body(png(noise(20, 30)), *pictures.TEXTS)}]
    sizes = [each["picture"] for each in handler.explain(rows, handler.context)]
    assert [(size["width"], size["height"]) for size in sizes] == [(50, 40), (20, 30)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"texts": ["a"]}, 'a file "image" and a field "texts"'),
        (clip_body(b"no picture", "a"), "cannot be read as an image"),
        (clip_body(b"", *"ab", "a"), "one string or more, all different"),
        (clip_body(b"", *"abcdefg"), "there are 7 texts; this model takes texts=1..6"),
        ({"image": 3, "texts": ["a"]}, "image is a int"),
    ],
    ids=["no image", "no picture", "twice", "too many", "number"],
)
def test_a_request_without_picture_or_texts_is_refused(
    folders: dict[str, Path], body: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        ask(loaded(ImageText, folders["clip"]), body)


def test_a_model_without_pictures_is_refused(drawn: Path, tmp_path: Path) -> None:
    folder = copied(drawn / "detector", tmp_path)
    with pytest.raises(LoadError, match="expected pictures and token ids"):
        load(ImageText, folder, config=IMAGE)
