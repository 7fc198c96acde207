import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from modelyard.handlers import BadInput, Context, HandlerError, ImageClassifier, LoadError
from modelyard.handlers.explain.attribute.attribution import DEFAULT_TOLERANCE
from tests.shared import FURTHER

MakeContext = Callable[..., Context]

ARTIFACTS = ["digits.onnx", "digits.pt2", "digits.pt"]


def classifier(context: Context) -> ImageClassifier:
    handler = ImageClassifier()
    handler.initialize(context)
    return handler


def scan_of(body: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(body)))).float().div(255)[None, None]


def asking(context: Context, *queries: dict[str, str], accept: str = "*/*") -> None:
    ids = [f"id-{index}" for index in range(len(queries))]
    context.reset(ids, [{"Accept": accept}] * len(ids), queries)


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_every_scan_gets_the_checkpoints_probabilities(
    make_context: MakeContext, digits_net: nn.Module, scans: list[bytes], artifact: str
) -> None:
    context = make_context(artifact, requests=8)
    answers = classifier(context).handle([{"body": bytearray(scan)} for scan in scans[:8]], context)
    for scan, answer in zip(scans, answers, strict=False):
        expected = digits_net(scan_of(scan)).softmax(1)[0]
        assert len(answer) == 10
        assert answer == pytest.approx(
            {str(digit): p for digit, p in enumerate(expected.tolist())}, abs=1e-5
        )


def test_held_out_scans_get_their_labels_likeliest_first(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context()
    handler = classifier(context)
    for digit, scan in enumerate(scans):
        (answer,) = handler.handle([{"body": bytearray(scan)}], context)
        assert next(iter(answer)) == str(digit)
        assert list(answer.values()) == sorted(answer.values(), reverse=True)


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (3, 3), (500, 10), (None, 5)])
def test_top_k_says_how_many_labels_come(
    make_context: MakeContext, scans: list[bytes], top_k: int | None, count: int
) -> None:
    section: dict[str, Any] = {"image": {"mode": "L", "size": [8, 8]}}
    if top_k is not None:
        section["top_k"] = top_k
    context = make_context(config={"handler": section})
    (answer,) = classifier(context).handle([{"body": scans[7]}], context)
    assert len(answer) == count


@pytest.mark.parametrize("top_k", [0, "5", True, 2.5])
def test_unusable_top_k_is_named(make_context: MakeContext, top_k: object) -> None:
    config = {"handler": {"image": {"mode": "L", "size": [8, 8]}, "top_k": top_k}}
    with pytest.raises(LoadError, match=r"handler\.top_k is"):
        classifier(make_context(config=config))


def test_equal_labels_keep_the_likelier(make_context: MakeContext) -> None:
    handler = classifier(make_context())
    handler.mapping = {"0": "cat", "1": "dog", "2": "cat"}
    (answer,) = handler.postprocess(torch.tensor([[1.0, 2.0, 3.0]]))
    assert list(answer) == ["cat", "dog"]
    assert answer["cat"] == pytest.approx(0.66524096)


def test_large_logits_do_not_overflow(make_context: MakeContext) -> None:
    handler = classifier(make_context())
    (answer,) = handler.postprocess(torch.tensor([[5000.0, -5000.0]]))
    assert answer == {"0": 1.0, "1": 0.0}


def test_first_of_several_outputs_is_classified(make_context: MakeContext) -> None:
    handler = classifier(make_context())
    first = torch.tensor([[0.0, 2.0]])
    assert handler.postprocess((first, torch.zeros(1, 3))) == handler.postprocess(first)


def test_output_that_is_not_logits_is_refused(make_context: MakeContext) -> None:
    with pytest.raises(HandlerError, match=r"gave \[1, 2, 2\]; .* needs logits \[N, K\]"):
        classifier(make_context()).postprocess(torch.zeros(1, 2, 2))


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_attributions_sum_to_the_difference_within_the_stated_delta(
    make_context: MakeContext, digits_net: nn.Module, scans: list[bytes], artifact: str
) -> None:
    twin = "digits.pt2" if artifact == "digits.onnx" else artifact
    context = make_context(artifact, twin)
    handler = classifier(context)
    for digit, scan in enumerate(scans):
        asking(context, {})
        (answer,) = handler.explain([{"body": bytearray(scan)}], context)
        total = np.asarray(answer["attributions"], np.float32).sum(dtype=np.float64)
        difference = answer["f_input"] - answer["f_baseline"]
        assert total == pytest.approx(answer["sum_attributions"], abs=1e-9)
        assert total - difference == pytest.approx(answer["convergence_delta"], abs=1e-9)
        assert answer["tolerance_met"] == (
            answer["error"] <= DEFAULT_TOLERANCE
            and abs(answer["convergence_delta"]) <= DEFAULT_TOLERANCE * abs(difference)
        )
        outputs = digits_net(torch.cat([scan_of(scan), torch.zeros(1, 1, 8, 8)]))[:, digit]
        assert [answer["f_input"], answer["f_baseline"]] == pytest.approx(
            outputs.tolist(), abs=1e-4
        )


def test_answer_says_what_was_explained_and_is_json(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context()
    asking(context, {"target": "3", "n_steps": "20", "baseline": "white"})
    (answer,) = classifier(context).explain([{"body": scans[7]}], context)
    answer = json.loads(json.dumps(answer, allow_nan=False))
    chosen = ("model", "version", "method", "target", "label", "baseline", "n_steps", "shape")
    assert {name: answer[name] for name in chosen} == {
        "model": "digits",
        "version": "1.0",
        "method": "integrated_gradients",
        "target": 3,
        "label": "3",
        "baseline": "white",
        "n_steps": 20,
        "shape": [1, 8, 8],
    }
    assert context.get_response_content_type(0) is None


def test_requests_of_one_batch_are_explained_each_as_it_asked(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context(requests=4)
    handler = classifier(context)
    queries = [{}, {"n_steps": "30"}, {"target": "1"}, {"n_steps": "30", "target": "4"}]
    data = [{"body": scan} for scan in scans[4:8]]
    asking(context, *queries)
    together = handler.explain(data, context)
    for row, query, answer in zip(data, queries, together, strict=True):
        asking(context, query)
        (alone,) = handler.explain([row], context)
        assert answer["target"] == alone["target"]
        assert answer["n_steps"] == alone["n_steps"]
        difference = np.subtract(answer["attributions"], alone["attributions"])
        assert np.abs(difference).max() < 1e-5
    assert [answer["target"] for answer in together] == [4, 5, 1, 4]


@pytest.mark.parametrize(("baseline", "value"), [("zero", 0.0), ("black", -2.0), ("white", 2.0)])
def test_black_and_white_are_set_before_normalising(
    make_context: MakeContext,
    digits_net: nn.Module,
    scans: list[bytes],
    baseline: str,
    value: float,
) -> None:
    image = {"mode": "L", "size": [8, 8], "mean": [0.5], "std": [0.25]}
    context = make_context(config={"handler": {"image": image}})
    asking(context, {"baseline": baseline, "target": "7"})
    (answer,) = classifier(context).explain([{"body": scans[7]}], context)
    expected = digits_net(torch.full((1, 1, 8, 8), value))[0, 7]
    assert answer["f_baseline"] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("baseline", ["mean", "blur", "noise", "file:page.png", "file:pages"])
@FURTHER
def test_baselines_are_pictures_of_the_inputs_size(
    make_context: MakeContext,
    digits_folder: Path,
    scans: list[bytes],
    tmp_path: Path,
    baseline: str,
) -> None:
    shutil.copytree(digits_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "page.png").write_bytes(scans[1])
    (tmp_path / "pages").mkdir()
    for digit in (1, 2):
        (tmp_path / "pages" / f"{digit}.png").write_bytes(scans[digit])
    context = make_context(folder=tmp_path)
    handler = classifier(context)
    (found,) = handler.baselines(baseline, (scan_of(scans[7]),), 5)
    assert found.shape == (2 if baseline == "file:pages" else 1, 1, 8, 8)
    expected = {
        "mean": scan_of(scans[7]).mean(),
        "file:page.png": scan_of(scans[1]),
        "file:pages": torch.cat([scan_of(scans[1]), scan_of(scans[2])]),
    }
    if baseline in expected:
        assert torch.allclose(found, expected[baseline].expand_as(found))
    assert 0 < found.std() < 1 or baseline == "mean"
    asking(context, {"baseline": baseline, "method": "gradient_shap", "seed": "1"})
    (answer,) = handler.explain([{"body": scans[7]}], context)
    assert answer["baseline"] == baseline


def test_channels_are_summed_where_it_is_asked_for(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context(requests=2)
    asking(context, {"aggregate": "sum"}, {})
    summed, whole = classifier(context).explain([{"body": scans[7]}] * 2, context)
    assert (summed["shape"], whole["shape"]) == ([8, 8], [1, 8, 8])
    assert summed["attributions"] == whole["attributions"][0]


def test_several_targets_are_drawn_below_one_another(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context()
    asking(context, {"format": "png", "target": "top-2", "method": "occlusion"})
    (two,) = classifier(context).explain([{"body": scans[7]}], context)
    asking(context, {"format": "png", "target": "predicted", "method": "occlusion"})
    (one,) = classifier(context).explain([{"body": scans[7]}], context)
    heights = [Image.open(io.BytesIO(each)).height for each in (two, one)]
    assert heights[0] == 2 * heights[1]


def test_label_of_the_mapping_is_a_target(make_context: MakeContext, scans: list[bytes]) -> None:
    context = make_context()
    handler = classifier(context)
    handler.mapping = {str(digit): f"digit {digit}" for digit in range(10)}
    asking(context, {"target": "digit 6"})
    (answer,) = handler.explain([{"body": scans[7]}], context)
    assert (answer["target"], answer["label"]) == (6, "digit 6")


@pytest.mark.parametrize("target", ["10", "-1", "seven", "", "²"])
def test_unknown_target_names_valid_ones(
    make_context: MakeContext, scans: list[bytes], target: str
) -> None:
    context = make_context()
    asking(context, {"target": target})
    with pytest.raises(
        BadInput, match="expected predicted, top-N, an index from 0 to 9, or a label: 0, 1"
    ):
        classifier(context).explain([{"body": scans[7]}], context)


@pytest.mark.parametrize(
    ("query", "accept"), [({"format": "png"}, "*/*"), ({}, "image/png")], ids=["query", "accept"]
)
def test_heat_map_is_a_png_file(
    make_context: MakeContext, scans: list[bytes], query: dict[str, str], accept: str
) -> None:
    context = make_context()
    asking(context, query, accept=accept)
    (answer,) = classifier(context).explain([{"body": scans[7]}], context)
    assert context.get_response_content_type(0) == "image/png"
    assert Image.open(io.BytesIO(answer)).format == "PNG"


def test_each_request_of_a_batch_gets_the_format_that_it_asked_for(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context(requests=2)
    asking(context, {"format": "png"}, {})
    picture, answer = classifier(context).explain([{"body": s} for s in scans[:2]], context)
    assert isinstance(picture, bytes)
    assert isinstance(answer, dict)
    assert context.get_response_content_type(0) == "image/png"
    assert context.get_response_content_type(1) is None


def test_json_numbers_of_a_picture_are_held_to_the_stated_values(
    make_context: MakeContext, digits_folder: Path
) -> None:
    report = json.loads((digits_folder / "digits.onnx.report.json").read_text())
    (image,) = report["signature"]["inputs"]
    stated = {**report["signature"], "inputs": [image | {"values": {"min": 0, "max": 1}}]}
    context = make_context(signature=stated)
    handler = classifier(context)
    picture = np.zeros((1, 8, 8))
    assert handler.handle([{"body": picture.tolist()}], context)
    picture[0, 3, 3] = 255
    with pytest.raises(BadInput, match=r'input "image" holds 255; expected values =0\.\.1'):
        handler.handle([{"body": picture.tolist()}], context)


@pytest.mark.parametrize("artifact", ["digits.pt2", "digits.onnx"])
def test_shares_are_of_the_ninths_of_a_picture(
    make_context: MakeContext, scans: list[bytes], artifact: str
) -> None:
    """With gradients from the attributions of 30 steps; without, from those of feature_ablation."""
    context = make_context(artifact, "digits.pt2" if artifact == "digits.pt2" else None)
    handler = classifier(context)
    (said,) = handler.shares([{"body": bytearray(scans[4])}], context)
    label, shares = said["class"], said["shares"]
    has_gradients = artifact == "digits.pt2"
    asking(context, {"n_steps": "30"} if has_gradients else {"method": "feature_ablation"})
    (answer,) = handler.explain([{"body": bytearray(scans[4])}], context)
    sizes = np.abs(np.asarray(answer["attributions"])[0])
    assert label == answer["label"]
    assert list(shares)[:4] == ["top left", "top centre", "top right", "middle left"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["top left"] == pytest.approx(sizes[:3, :3].sum() / sizes.sum(), abs=1e-6)
    assert shares["bottom right"] == pytest.approx(sizes[6:, 6:].sum() / sizes.sum(), abs=1e-6)
    assert shares["middle centre"] > shares["bottom left"]


CROPPED = {"handler": {"image": {"mode": "L", "resize": 16, "crop": [8, 8]}}}


def picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def test_an_answer_says_which_part_of_the_picture_was_seen(make_context: MakeContext) -> None:
    context = make_context(config=CROPPED)
    handler = classifier(context)
    asking(context, *[{"n_steps": "3"}] * 3)
    bodies = [picture(64, 32), [[[0.5] * 8] * 8], picture(20, 40)]
    first, numbers, last = handler.explain([{"body": body} for body in bodies], context)
    assert first["picture"] == {"width": 64, "height": 32, "crop": [24, 8, 40, 24]}
    assert "picture" not in numbers
    assert last["picture"] == {"width": 20, "height": 40, "crop": [5, 15, 15, 25]}


def test_an_overlay_has_the_size_of_the_picture_and_lies_on_the_part_that_was_seen(
    make_context: MakeContext,
) -> None:
    context = make_context(config=CROPPED)
    handler = classifier(context)
    asking(context, {"format": "overlay", "target": "3", "n_steps": "10"})
    (png,) = handler.explain([{"body": picture(64, 32)}], context)
    assert context.get_response_content_type(0) == "image/png"
    sheet = np.asarray(Image.open(io.BytesIO(png)))
    assert sheet.shape == (32, 64, 4)
    seen = sheet[8:24, 24:40, 3]
    assert seen.max() == 255
    assert sheet[:, :, 3].astype(int).sum() == seen.astype(int).sum()
    asking(context, {"format": "overlay", "n_steps": "3"})
    (small,) = handler.explain([{"body": [[[0.5] * 8] * 8]}], context)
    assert Image.open(io.BytesIO(small)).size == (8, 8)


def test_a_picture_is_drawn_after_baselines_from_files_were_read(
    make_context: MakeContext, scans: list[bytes], digits_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(digits_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "page.png").write_bytes(picture(30, 30))
    context = make_context(config=CROPPED, folder=tmp_path)
    handler = classifier(context)
    asking(context, {"baseline": "file:page.png", "n_steps": "3"})
    (answer,) = handler.explain([{"body": picture(64, 32)}], context)
    assert answer["picture"]["width"] == 64


@pytest.mark.parametrize("accept", ["", "application/x-npy"])
def test_attributions_are_an_array_too(
    make_context: MakeContext, scans: list[bytes], accept: str
) -> None:
    context = make_context()
    handler = classifier(context)
    query = {"target": "3", "n_steps": "10"}
    asking(context, query, accept="*/*")
    (answer,) = handler.explain([{"body": scans[3]}], context)
    asking(context, query if accept else query | {"format": "npy"}, accept=accept)
    (file,) = handler.explain([{"body": scans[3]}], context)
    found = np.load(io.BytesIO(file), allow_pickle=False)
    assert found.dtype == np.float32
    assert found.tolist() == np.array(answer["attributions"], np.float32).tolist()
    headers = context.get_response_headers(0)
    assert headers["content-type"] == "application/x-npy"
    facts = json.loads(headers["x-explanation"])
    assert facts.items() <= answer.items()
    assert set(answer) - set(facts) == {"attributions", "shape", "picture"}


@pytest.mark.parametrize("format", ["npy", "overlay"])
def test_one_file_holds_one_explanation(
    make_context: MakeContext, scans: list[bytes], format: str
) -> None:
    context = make_context()
    asking(context, {"format": format, "target": "top-2"})
    with pytest.raises(BadInput, match="expected one target of one output"):
        classifier(context).explain([{"body": scans[3]}], context)


def test_a_page_of_a_picture_has_it_and_both_labels(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context()
    asking(context, {"n_steps": "10"}, accept="text/html,application/xhtml+xml,*/*;q=0.8")
    (page,) = classifier(context).explain([{"body": scans[7]}], context)
    text = page.decode()
    assert text.count("<h2>Why “") == 2
    assert "Why “7”? <small>probability " in text
    assert text.count("<img") == 5
    assert text.count('type="range"') == 2
    assert "8 × 8 pixels" in text


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("feature_ablation", "against, which need not add up to that"),
        ("input_x_gradient", "against, which need not add up to that"),
        ("smoothgrad", None),
        ("saliency", None),
    ],
)
def test_a_page_does_not_add_up_what_has_no_sum(
    make_context: MakeContext, scans: list[bytes], method: str, said: str | None
) -> None:
    context = make_context()
    draws = {"n_samples": "2"} if method == "smoothgrad" else {}
    asking(context, {"format": "html", "target": "7", "method": method, **draws})
    (page,) = classifier(context).explain([{"body": scans[7]}], context)
    account = page.decode().partition("<p>logit from ")[2].partition("</p>")[0]
    assert account
    assert said in account if said else ";" not in account and "against" not in account


@FURTHER
def test_a_page_of_a_layer_has_its_largest_values(
    make_context: MakeContext, scans: list[bytes]
) -> None:
    context = make_context()
    query = {"method": "layer_integrated_gradients", "layer": "logits", "n_steps": "5"}
    asking(context, {**query, "format": "html", "target": "3"})
    (page,) = classifier(context).explain([{"body": scans[3]}], context)
    assert "logits[3]" in page.decode()
    asking(context, {**query, "format": "overlay", "target": "3"})
    with pytest.raises(BadInput, match="which is not of places in a picture"):
        classifier(context).explain([{"body": scans[3]}], context)
