import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from modelyard.base import explain_words as words
from modelyard.handlers import BadInput, Context, LoadError, VisionHandler
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.tasks.pictures import (
    DEFAULT_SETTINGS,
    MAX_PIXELS,
    ImageSettings,
    colour_table,
    decode,
    open_picture,
    read_settings,
    to_size,
)

MakeContext = Callable[..., Context]

# Pillow warns of some damage before it raises, or instead.
damage_warnings = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

TINY_L = ImageSettings(mode="L")


def file_of(image: Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def noise(height: int, width: int, *channels: int) -> np.ndarray:
    pixels: np.ndarray = np.random.default_rng(1).integers(
        0, 256, (height, width, *channels), dtype=np.uint8
    )
    return pixels


class Mean(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.mean((2, 3))


@pytest.fixture(scope="module")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive's folder whose model takes image:float32[batch,3,height,width]."""
    folder = tmp_path_factory.mktemp("photo")
    batch = torch.export.Dim("batch", min=1, max=8)
    height, width = torch.export.Dim("height", max=512), torch.export.Dim("width", max=512)
    program = torch.export.export(
        Mean(), (torch.rand(5, 3, 20, 30),), dynamic_shapes=({0: batch, 2: height, 3: width},)
    )
    torch.export.save(program, folder / "mean.pt2")
    return folder


@pytest.fixture
def digits_handler(make_context: MakeContext) -> VisionHandler:
    handler = VisionHandler()
    handler.initialize(make_context())
    return handler


@pytest.mark.parametrize(
    "encode",
    [bytes, bytearray, lambda body: base64.b64encode(body).decode()],
    ids=["bytes", "bytearray", "base64"],
)
def test_scan_becomes_exactly_its_pixels_over_255(
    digits_handler: VisionHandler, scans: list[bytes], encode: Callable[[bytes], object]
) -> None:
    tensor = digits_handler.preprocess([{"body": encode(scans[7])}])
    pixels = np.asarray(Image.open(io.BytesIO(scans[7])))
    assert isinstance(tensor, Tensor)
    assert torch.equal(tensor, torch.from_numpy(pixels.copy()).float().div(255)[None, None])


def test_nested_list_is_the_models_input_itself(digits_handler: VisionHandler) -> None:
    rows = torch.rand(1, 8, 8)
    tensor = digits_handler.preprocess([{"body": rows.tolist()}])
    assert isinstance(tensor, Tensor)
    assert torch.equal(tensor, rows[None])


def test_picture_is_what_the_model_saw(make_context: MakeContext, scans: list[bytes]) -> None:
    handler = VisionHandler()
    image = {"mode": "L", "size": [8, 8], "mean": [0.1307], "std": [0.3081]}
    handler.initialize(make_context(config={"handler": {"image": image}}))
    tensor = handler.preprocess([{"body": scans[3]}])
    assert isinstance(tensor, Tensor)
    assert handler.picture(tensor[0]).tobytes() == Image.open(io.BytesIO(scans[3])).tobytes()


def test_colours_are_normalised_per_channel(make_context: MakeContext, photo_folder: Path) -> None:
    handler = VisionHandler()
    image = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    context = make_context(
        "mean.pt2", None, folder=photo_folder, signature=None, config={"handler": {"image": image}}
    )
    handler.initialize(context)
    pixels = noise(11, 13, 3)
    tensor = handler.preprocess([{"body": file_of(Image.fromarray(pixels))}])
    mean, std = torch.tensor(image["mean"]), torch.tensor(image["std"])
    expected = ((torch.from_numpy(pixels).float() / 255 - mean) / std).permute(2, 0, 1)
    assert isinstance(tensor, Tensor)
    assert torch.equal(tensor[0], expected)
    assert handler.picture(tensor[0]).tobytes() == Image.fromarray(pixels).tobytes()


def test_without_settings_photos_get_torchserves_transform(
    make_context: MakeContext, photo_folder: Path
) -> None:
    handler = VisionHandler()
    handler.initialize(
        make_context("mean.pt2", None, folder=photo_folder, signature=None, config={})
    )
    photo = Image.fromarray(noise(300, 401, 3))
    tensor = handler.preprocess([{"body": file_of(photo)}])
    assert isinstance(tensor, Tensor)
    assert tensor.shape == (1, 3, 224, 224)
    # Resize(256) of 401 × 300 gives 342 × 256; CenterCrop(224) begins at round(59.0), round(16.0).
    small = np.asarray(photo.resize((342, 256), Image.Resampling.BILINEAR))[16:240, 59:283]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((small / 255 - mean) / std).transpose(2, 0, 1)
    assert np.abs(tensor[0].numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_mode_is_converted(mode: str) -> None:
    image = Image.fromarray(np.full((4, 4), 255, np.uint8)).convert(mode)
    format = "TIFF" if mode == "CMYK" else "PNG"
    for wanted, shape in (("L", (4, 4)), ("RGB", (4, 4, 3))):
        pixels = decode(file_of(image, format), ImageSettings(mode=wanted), None)
        assert pixels.shape == shape
        assert (pixels == 255).all()


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 256], [32768, 65535]], np.uint16)
    assert decode(file_of(Image.fromarray(values)), TINY_L, None).tolist() == [[0, 1], [128, 255]]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_listed_format_is_decoded(format: str) -> None:
    body = file_of(Image.fromarray(np.full((4, 4), 255, np.uint8)), format)
    assert decode(body, TINY_L, None).min() >= 250


@pytest.mark.parametrize(
    "body",
    [b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n"],
    ids=["text", "a program (EPS)", "only a PNG signature"],
)
def test_body_that_is_no_image_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput, match="cannot be read as an image: not an image; send one file"):
        decode(body, TINY_L, None)


@damage_warnings
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_image_cut_anywhere_is_refused_or_decoded_but_never_breaks(format: str) -> None:
    whole = file_of(Image.fromarray(noise(9, 9)), format)
    refused = 0
    for length in range(1, len(whole)):
        try:
            decode(whole[:length], TINY_L, None)
        except BadInput:
            refused += 1
    assert refused > len(whole) / 2


def damaged_copies(whole: bytes) -> Iterator[bytes]:
    for place in range(len(whole)):
        yield whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]


@damage_warnings
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_image_with_a_flipped_byte_never_breaks(format: str) -> None:
    for body in damaged_copies(file_of(Image.fromarray(noise(6, 6)), format)):
        try:
            assert decode(body, TINY_L, 10_000).dtype == np.uint8
        except BadInput as error:
            assert "image" in str(error)


def test_text_that_is_not_base64_is_refused(digits_handler: VisionHandler) -> None:
    with pytest.raises(BadInput, match="text but not base64"):
        digits_handler.preprocess([{"body": "a"}])


def test_empty_body_is_refused(digits_handler: VisionHandler) -> None:
    with pytest.raises(BadInput, match="the body is empty"):
        digits_handler.preprocess([{"body": bytearray()}])


def test_image_over_the_pixel_limit_is_refused_undecoded() -> None:
    body = file_of(Image.fromarray(noise(20, 30)))
    with pytest.raises(BadInput, match="30 × 20 pixels; the limit is 500"):
        decode(body, TINY_L, 500)
    assert decode(body, TINY_L, 600).shape == (20, 30)


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        (ImageSettings(size=(5, 7)), (40, 30), (7, 5)),
        (ImageSettings(resize=10), (40, 30), (13, 10)),
        (ImageSettings(resize=10), (30, 40), (10, 13)),
        (ImageSettings(resize=10, crop=(8, 6)), (40, 30), (6, 8)),
        (ImageSettings(crop=(30, 40)), (40, 30), (40, 30)),
        (ImageSettings(), (40, 30), (40, 30)),
    ],
    ids=["size", "wide", "tall", "resize and crop", "crop of all", "as it is"],
)
def test_sizes_follow_the_settings(
    settings: ImageSettings, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert to_size(Image.new("RGB", size), settings).size == expected


def any_size(make_context: MakeContext, folder: Path, **image: Any) -> VisionHandler:
    """Return a handler of pictures of 2 to 512 pixels a side, whatever they are."""
    handler = VisionHandler()
    config = {"handler": {"image": {"mean": [0.0] * 3, **image}}}
    handler.initialize(make_context("mean.pt2", None, folder=folder, signature=None, config=config))
    return handler


def test_picture_of_a_size_that_was_not_exported_is_refused_undecoded(
    make_context: MakeContext, photo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = any_size(make_context, photo_folder)
    assert handler.handle([{"body": file_of(Image.new("RGB", (512, 100)))}], handler.context)
    body = file_of(Image.new("RGB", (2000, 100)))
    monkeypatch.setattr(Image.Image, "convert", None)
    monkeypatch.setattr(Image.Image, "load", None)
    message = r"the image is 2000 × 100 pixels; the model takes .*512 and .*512"
    for explains in (handler.handle, handler.explain):
        with pytest.raises(BadInput, match=message):
            explains([{"body": body}], handler.context)
    shorter = any_size(make_context, photo_folder, resize=40)
    with pytest.raises(BadInput, match="2000 × 100 pixels, 800 × 40 as resized; the model takes"):
        shorter.handle([{"body": body}], shorter.context)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photo_is_turned_as_the_camera_was_held(format: str, orientation: int) -> None:
    blocks = np.kron(np.array([[0, 255, 128], [255, 255, 0]], np.uint8), np.ones((16, 16)))
    stored = Image.fromarray(blocks.astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    stored.save(file, format, exif=exif)
    shown = ImageOps.exif_transpose(Image.open(file))
    assert (shown.size == (32, 48)) == (orientation >= 5)
    sizes: list[tuple[int, int]] = []
    upright = open_picture(
        file.getvalue(), TINY_L, None, lambda width, height: sizes.append((width, height))
    )
    assert upright.tobytes() == shown.convert("L").tobytes()
    as_stored = open_picture(file.getvalue(), replace(TINY_L, upright=False), None)
    if format != "TIFF":  # which Pillow turns itself
        assert sizes == [upright.size]
        assert as_stored.size == (48, 32)


def test_image_smaller_than_the_crop_is_refused() -> None:
    with pytest.raises(BadInput, match="40 × 30 pixels after resizing; expected at least 41 × 30"):
        to_size(Image.new("RGB", (40, 30)), ImageSettings(crop=(30, 41)))


def test_table_holds_every_pixel_value_normalised() -> None:
    table = colour_table(DEFAULT_SETTINGS)
    assert table.shape == (3, 256)
    assert table[1, 51] == pytest.approx((0.2 - 0.456) / 0.224, abs=1e-6)


def test_settings_are_read_from_model_config() -> None:
    section = {"mode": "L", "size": [28, 30], "mean": [0.1], "std": [1]}
    assert read_settings(section) == ImageSettings("L", None, None, (28, 30), (0.1,), (1.0,))
    assert read_settings(None) == DEFAULT_SETTINGS


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("L", r"handler\.image is 'L'; expected entries of mode"),
        (
            {"sise": [8, 8]},
            r"handler\.image\.sise is unknown; expected mode, .*; did you mean size\?",
        ),
        ({"mode": "BGR"}, r"handler\.image\.mode is 'BGR'; expected one of L, RGB"),
        ({"size": [8]}, r"handler\.image\.size is \[8\]; expected \[height, width\]"),
        ({"crop": [0, 8]}, r"handler\.image\.crop is \[0, 8\]"),
        ({"resize": True}, r"handler\.image\.resize is True"),
        ({"size": [8, 8], "resize": 9}, r"size and also resize or crop"),
        ({"resize": 7, "crop": [8, 8]}, r"resize is 7; expected at least crop's 8"),
        ({"mean": [0.5]}, r"handler\.image\.mean is \[0\.5\]; mode RGB expects 3 numbers"),
        ({"mode": "L", "std": ["1"]}, r"handler\.image\.std is \['1'\]; mode L expects 1"),
        ({"mode": "L", "std": [0]}, r"handler\.image\.std is \[0\.0\]; expected no zero"),
        ({"upright": 1}, r"handler\.image\.upright is 1; expected true or false"),
    ],
    ids=lambda value: str(value) if not isinstance(value, str) else "",
)
def test_unusable_setting_is_named(section: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_settings(section)


@pytest.mark.parametrize(
    "config",
    [{}, {"handler": {"image": {"mode": "L", "size": [9, 8]}}}],
    ids=["defaults", "another size"],
)
def test_settings_that_the_artifact_cannot_take_say_what_to_write(
    make_context: MakeContext, config: dict[str, Any]
) -> None:
    wanted = r"takes image:float32\[batch=1\.\.8,1,8,8\].*mode: L, size: \[8, 8\]"
    with pytest.raises(LoadError, match=wanted):
        VisionHandler().initialize(make_context(config=config))


def test_handler_section_that_is_no_mapping_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(LoadError, match=r"handler is \[1\] in model-config\.yaml"):
        VisionHandler().initialize(make_context(config={"handler": [1]}))


def test_limit_on_pixels_can_be_lifted(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    context = make_context()
    context.system_properties["limit_max_image_pixels"] = False
    handler = VisionHandler()
    handler.initialize(context)
    assert handler.max_pixels is None
    assert Image.MAX_IMAGE_PIXELS is None


def test_limit_on_pixels_is_the_servers(make_context: MakeContext) -> None:
    context = make_context()
    handler = VisionHandler()
    handler.initialize(context)
    assert handler.max_pixels == MAX_PIXELS
    context.system_properties["max_image_pixels"] = 500
    handler.initialize(context)
    with pytest.raises(BadInput, match=r"30 × 20 pixels; the limit is 500 .*max_image_pixels"):
        handler.preprocess([{"body": file_of(Image.fromarray(noise(20, 30)))}])


@pytest.mark.parametrize("method", ["occlusion", "feature_ablation", "kernel_shap"])
def test_a_window_counts_once_whatever_its_channels(
    make_context: MakeContext, photo_folder: Path, method: str
) -> None:
    handler = VisionHandler()
    config = {"handler": {"image": {"size": [20, 30]}}}
    context = make_context("mean.pt2", None, folder=photo_folder, signature=None, config=config)
    handler.initialize(context)
    pixels = noise(20, 30, 3)
    body = file_of(Image.fromarray(pixels))
    query = {"method": method, "window": "10", "target": "1", "aggregate": "sum"}
    query |= {"stride": "10"} if method == "occlusion" else {}
    context.reset(["a"], queries=[query])
    (answer,) = handler.explain([{"body": body}], context)
    found = np.array(answer["attributions"])
    # The model is the mean of green: a window's share is what it has of it.
    falls = pixels[:, :, 1].reshape(2, 10, 3, 10).sum((1, 3)) / 255 / 600
    values = 1 if method != "kernel_shap" else 100  # which shares the fall among the values
    assert found == pytest.approx(np.kron(falls, np.ones((10, 10))) / values, abs=1e-6)
    assert answer["sum_attributions"] == pytest.approx(falls.sum(), abs=1e-5)
    assert answer["sum_attributions"] == pytest.approx(answer["f_input"], abs=1e-5)
    if method == "kernel_shap":
        assert answer["relative_delta"] < 1e-5
    tensor = handler.preprocess([{"body": body}])
    assert isinstance(tensor, Tensor)
    ((drawn,),) = explain_batch(handler.explained_model(), (tensor,), [parse_options(query)])
    heat = handler._heat(tensor[0], drawn)
    assert heat is not None
    assert heat.sums == pytest.approx((falls.sum(), 0.0), abs=1e-5)
    largest = falls.max() / falls.sum() / values
    assert heat.bar_labels[0] == f"+{words.percent(largest)} of all"


def test_each_channel_has_the_fall_of_its_window(
    make_context: MakeContext, photo_folder: Path
) -> None:
    handler = VisionHandler()
    config = {"handler": {"image": {"size": [20, 30]}}}
    handler.initialize(
        make_context("mean.pt2", None, folder=photo_folder, signature=None, config=config)
    )
    body = {"body": file_of(Image.fromarray(noise(20, 30, 3)))}
    pictures = []
    for aggregate in ("sum", "none"):
        query = {"method": "feature_ablation", "window": "10", "aggregate": aggregate}
        handler.context.reset(["a"], queries=[query])
        (answer,) = handler.explain([body], handler.context)
        pictures.append(np.array(answer["attributions"]))
    summed, whole = pictures
    assert np.array_equal(whole, np.stack([summed] * 3))
