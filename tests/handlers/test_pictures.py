"""Files of Hugging Face's image processors → the same pixels and values."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelyard.handlers import LoadError
from modelyard.handlers.tasks.pictures import colour_table, decode, find_settings


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3))
    smooth = Image.fromarray(pixels.astype(np.uint8)).resize((width, height))
    return smooth


COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25]}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit.image_processing_pil_vit:ViTImageProcessorPil",
            {"size": {"height": 20, "width": 24}}),
    "bicubic": ("vit.image_processing_pil_vit:ViTImageProcessorPil",
                {"size": {"height": 30, "width": 30}, "resample": 3}),
    "CLIP": ("clip.image_processing_pil_clip:CLIPImageProcessorPil",
             {"size": {"shortest_edge": 27}, "crop_size": {"height": 22, "width": 22}}),
    "larger crop": ("clip.image_processing_pil_clip:CLIPImageProcessorPil",
                    {"size": {"shortest_edge": 19}, "crop_size": {"height": 24, "width": 24}}),
    "ConvNeXT": ("convnext.image_processing_pil_convnext:ConvNextImageProcessorPil",
                 {"size": {"shortest_edge": 28}, "crop_pct": 0.8}),
    "DETR": ("detr.image_processing_pil_detr:DetrImageProcessorPil",
             {"size": {"shortest_edge": 40, "longest_edge": 53}, "do_pad": False}),
    "SegFormer": ("segformer.image_processing_pil_segformer:SegformerImageProcessorPil",
                  {"size": {"height": 16, "width": 16}, "do_reduce_labels": True}),
    "another scale": ("vit.image_processing_pil_vit:ViTImageProcessorPil",
                      {"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5}),
    "nothing": ("vit.image_processing_pil_vit:ViTImageProcessorPil",
                {"do_resize": False, "do_normalize": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(61, 47), (33, 80)], ids=["wide", "high"])
def test_a_picture_becomes_what_transformers_makes_of_it(
    tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    module, _, made = PROCESSORS[name][0].partition(":")
    found = __import__(f"transformers.models.{module}", fromlist=[made])
    processor = getattr(found, made)(**COLOURS, **PROCESSORS[name][1])
    processor.save_pretrained(tmp_path)
    picture = noise(*size)
    expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
    settings = find_settings(None, tmp_path)
    pixels = decode(png(picture), settings, None)
    table = colour_table(settings)
    values = np.stack([table[at][pixels[:, :, at]] for at in range(3)])
    np.testing.assert_allclose(values, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_flip_channel_order": True}, "asks for do_flip_channel_order, which this handler"),
        ({"size": {"longest_edge": 9}}, "cannot be read as the file of an image processor"),
        ({"image_mean": [0.5], "image_std": [0.0]}, "cannot be read as the file"),
    ],
    ids=["BGR", "size", "zero"],
)
def test_a_processor_of_other_steps_is_refused(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps({"image_processor": {**COLOURS, **content}}))
    with pytest.raises(LoadError, match=f"processor_config.json {message}"):
        find_settings(None, tmp_path)


def test_settings_of_the_archive_come_before_the_processors_file(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert find_settings({"size": [4, 5]}, tmp_path).shape == (3, 4, 5)
