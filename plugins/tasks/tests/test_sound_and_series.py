"""Sounds as transformers makes inputs of them, their labels and texts; windows and forecasts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor

from examples.tasks import series, sounds
from modelyard.handlers import (
    AudioClassifier,
    BadInput,
    Forecaster,
    LoadError,
    SpeechRecognizer,
)
from modelyard.plugins.tasks.audio_handler import AudioHandler, decode_sound, read_alphabet
from tests.answer_schema import wrong_in
from tests.handlers.folders import ask, copied, explain, lightened, load, save_program

AUDIO = {"audio": {"rate": sounds.RATE, "seconds": 10}}
RANDOM = np.random.default_rng(9)


def file_of(samples: np.ndarray, rate: int, format: str = "WAV", **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's networks, each with a program."""
    folder = sounds.make(tmp_path_factory.mktemp("sounds"))
    for name, net in (("tone", sounds.Namer()), ("speller", sounds.Speller())):
        net.load_state_dict(torch.load(folder / f"{name}.pt"))
        inputs = ["wave:float32[batch=1..4,samples=160..40000]"]
        save_program(net, inputs, folder / name / "model.pt2")
    return folder


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options", "atol"),
    [
        ("WAV", {"subtype": "PCM_16"}, 1e-4),
        ("WAV", {"subtype": "FLOAT"}, 1e-7),
        ("FLAC", {}, 1e-4),
        ("OGG", {}, 0.1),
    ],
    ids=["WAV", "WAV of floats", "FLAC", "OGG"],
)
def test_a_file_of_two_channels_becomes_their_mean(
    format: str, options: dict[str, Any], atol: float
) -> None:
    time = np.arange(8000) / 8000
    waves = np.stack((np.sin(time * 2 * np.pi * 200), 0.2 * np.sin(time * 2 * np.pi * 300)), 1)
    samples = decode_sound(file_of(waves * 0.5, 8000, format, **options), 8000, 2)
    np.testing.assert_allclose(samples, (waves * 0.5).mean(1), atol=atol)


@pytest.mark.parametrize("rate", [44100, 22050, 8000])
def test_a_sound_of_another_rate_is_resampled(rate: int) -> None:
    """A tone keeps its pitch and height, and one that the lower rate cannot hold is gone."""
    time, wanted = np.arange(rate) / rate, np.arange(16000) / 16000
    low = np.sin(time * 2 * np.pi * 440)
    found = decode_sound(file_of(low, rate), 16000, 2)
    assert len(found) == 16000
    np.testing.assert_allclose(
        found[800:-800], np.sin(wanted * 2 * np.pi * 440)[800:-800], atol=5e-3
    )
    if rate > 20000:
        high = decode_sound(file_of(np.sin(time * 2 * np.pi * 9500), rate), 16000, 2)
        assert np.abs(high[800:-800]).max() < 1e-3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"ID3 and more", "is not a sound; send one file of WAV, FLAC, OGG"),
        (file_of(np.zeros(800), 8000)[:30], "cannot be read as a sound"),
        (file_of(np.zeros(8000 * 3), 8000), r"3\.00 s; expected at most 2"),
        (file_of(np.full(80, np.nan), 8000, subtype="FLOAT"), "not finite numbers"),
    ],
    ids=["other", "cut", "long", "NaN"],
)
def test_what_is_not_a_sound_of_that_length_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        decode_sound(body, 8000, 2)


@pytest.mark.parametrize("cut", range(0, 300, 23))
def test_a_damaged_file_is_the_clients_fault(cut: int) -> None:
    whole = bytearray(file_of(np.sin(np.arange(400.0)), 8000, "FLAC"))
    whole[cut] ^= 0xFF
    try:
        decode_sound(whole, 8000, 2)
    except BadInput:
        decode_sound(file_of(np.zeros(8), 8000), 8000, 2)


# -- processors -----------------------------------------------------------------------------------


class Echo(nn.Module):
    """The samples themselves, and the mask where there is one."""

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return input_values * 1.0, attention_mask * 1


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_batch_becomes_what_transformers_makes_of_it(tmp_path: Path, normalizes: bool) -> None:
    make: Any = Wav2Vec2FeatureExtractor
    processor = make(sampling_rate=8000, do_normalize=normalizes, return_attention_mask=True)
    processor.save_pretrained(tmp_path)
    inputs = ["input_values:float32[batch=1..4,samples=10..9000]",
              "attention_mask:int64[batch,samples]"]  # fmt: skip
    save_program(Echo(), inputs, tmp_path / "model.pt2")
    handler = load(AudioHandler, tmp_path, batch_size=2)
    waves = [RANDOM.normal(0.1, 0.2, size).astype(np.float32) for size in (700, 500)]
    values, mask = handler.preprocess(
        [{"body": file_of(wave, 8000, subtype="FLOAT")} for wave in waves]
    )
    expected = processor(waves, sampling_rate=8000, padding=True, return_tensors="pt")
    torch.testing.assert_close(values, expected["input_values"], atol=1e-5, rtol=0)
    assert mask.tolist() == expected["attention_mask"].tolist()


# -- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", sounds.PITCHES)
def test_a_tone_is_named_whatever_its_file(trained: Path, letter: str) -> None:
    handler = load(AudioClassifier, trained / "tone", config=AUDIO)
    wave = sounds.tone(letter, 12, RANDOM, 16000)
    as_text = base64.b64encode(file_of(wave, 16000)).decode()
    for body in (file_of(wave, 16000), file_of(wave, 16000, "FLAC"), as_text):
        (answer,) = ask(handler, body)
        assert max(answer, key=answer.__getitem__) == letter
    (answer,) = ask(handler, sounds.tone(letter, 12, RANDOM).tolist())
    assert max(answer, key=answer.__getitem__) == letter


def test_a_label_is_explained_by_when_it_sounds(trained: Path) -> None:
    handler = load(AudioClassifier, trained / "tone", config=AUDIO)
    wave = np.concatenate([sounds.tone("", 10, RANDOM), sounds.tone("c", 10, RANDOM)])
    found = explain(handler, file_of(wave, sounds.RATE), n_steps="20")
    assert wrong_in(found) == []
    assert (found["label"], found["seconds_per_value"]) == ("c", 0.02)
    shares = np.abs(found["attributions"])
    assert len(shares) == len(wave) / sounds.RATE / 0.02
    assert shares[len(shares) // 2 :].sum() > 3 * shares[: len(shares) // 2].sum()


# -- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cab", "abba", "dad"])
def test_a_tune_is_spelled(trained: Path, text: str) -> None:
    handler = load(SpeechRecognizer, trained / "speller", config=AUDIO)
    (answer,) = ask(handler, file_of(sounds.tune(text, RANDOM, 8000), 8000))
    assert answer["text"] == text
    (word,) = answer["words"]
    assert word["start"] == pytest.approx(0.04, abs=0.021)
    assert word["end"] == pytest.approx(0.02 * 6 * len(text), abs=0.021)


def test_tokens_become_the_text_of_transformers(trained: Path, tmp_path: Path) -> None:
    make: Any = Wav2Vec2CTCTokenizer
    tokenizer = make(
        str(trained / "speller" / "vocab.json"), unk_token="<pad>", do_lower_case=True,
        bos_token=None, eos_token=None,
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    handler = load(SpeechRecognizer, trained / "speller", config=AUDIO)
    handler.alphabet = read_alphabet(tmp_path, {})
    assert handler.alphabet.is_lower
    for _ in range(20):
        best = RANDOM.integers(0, len(sounds.VOCABULARY), 30)
        logits = torch.nn.functional.one_hot(torch.from_numpy(best), len(sounds.VOCABULARY))
        handler.lengths = [30 * sounds.FRAME]
        (answer,) = handler.postprocess(logits[None].float())
        assert answer["text"] == tokenizer.decode(best.tolist())
        assert [each["word"] for each in answer["words"]] == answer["text"].split()


def test_a_letter_is_explained_by_its_frame(trained: Path) -> None:
    handler = load(SpeechRecognizer, trained / "speller", config=AUDIO)
    found = explain(handler, file_of(sounds.tune("cab", RANDOM), sounds.RATE), target="a",
                    n_steps="10")  # fmt: skip
    assert found["label"].startswith('"a" in frame ')
    frame = found["target"][0]
    assert int(np.abs(found["attributions"]).argmax()) == frame
    assert 8 <= frame < 12


@pytest.mark.parametrize(
    ("handler", "section", "message"),
    [
        (SpeechRecognizer, {"blank": "_"}, "the vocabulary has no '_'"),
        (AudioClassifier, {"rate": "fast"}, "rate is 'fast'; expected a whole number from 1000"),
        (AudioClassifier, {"normalize": 1}, "normalize is 1; expected true or false"),
        (AudioClassifier, {"blank": "_"}, "handler.audio.blank is unknown"),
    ],
    ids=["blank", "rate", "normalize", "unknown"],
)
def test_a_wrong_setting_of_sounds_ends_the_start(
    trained: Path, tmp_path: Path, handler: Any, section: dict[str, Any], message: str
) -> None:
    name = "speller" if handler is SpeechRecognizer else "tone"
    with pytest.raises(LoadError, match=message):
        load(handler, lightened(trained / name, tmp_path), config={"audio": section})


def test_a_processor_that_makes_spectrograms_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained / "tone", tmp_path)
    content = {"feature_extractor_type": "ASTFeatureExtractor", "sampling_rate": 16000}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"preprocessor_config\.json asks for a ASTFeatureExtr"):
        load(AudioClassifier, folder)


@pytest.mark.parametrize("size", [0, 159, 40001], ids=["nothing", "short", "long"])
def test_a_sound_of_a_length_that_the_model_does_not_take(trained: Path, size: int) -> None:
    """A shorter one is filled up with silence; a longer one, or none, is refused."""
    handler = load(AudioClassifier, trained / "tone", config={"audio": {"rate": 4000}})
    body = file_of(np.zeros(size), 4000)
    if size == 159:
        assert handler.preprocess([{"body": body}]).shape == (1, 160)
        return
    with pytest.raises(BadInput, match=r"s; expected more than 0 and at most 10\.00"):
        ask(handler, body)


# -- series ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forecast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = series.make(tmp_path_factory.mktemp("series"))
    net = series.Quantiles()
    net.load_state_dict(torch.load(folder / "series.pt"))
    inputs = [f"values:float32[batch=1..4,{series.LENGTH},{series.SERIES}]"]
    save_program(net, inputs, folder / "series" / "model.pt2")
    return folder


QUANTILES = {"series": {"quantiles": list(series.QUANTILES)}}


def test_a_forecast_is_the_networks_in_units_of_the_request(forecast: Path) -> None:
    handler = load(Forecaster, forecast / "series", config=QUANTILES)
    window = json.loads((forecast / "window.json").read_text())
    (answer,) = ask(handler, window)
    scaler = json.loads((forecast / "series" / "scaler.json").read_text())
    mean, std = (np.array(scaler[name]) for name in ("mean", "std"))
    net = series.Quantiles()
    net.load_state_dict(torch.load(forecast / "series.pt"))
    values = torch.from_numpy(((np.array(window) - mean) / std).astype(np.float32))
    expected = net(values[None])[0].detach().numpy()
    assert [*answer["quantiles"]] == ["0.1", "0.5", "0.9"]
    for at, name in enumerate(answer["quantiles"]):
        found = np.array(answer["quantiles"][name])
        np.testing.assert_allclose(found, expected[..., at] * std + mean, rtol=1e-5)


def test_the_median_of_a_wave_is_near_it_and_most_of_it_between_the_quantiles(
    forecast: Path,
) -> None:
    handler = load(Forecaster, forecast / "series", config=QUANTILES, batch_size=4)
    drawn = series.windows(4, np.random.default_rng(77))
    answers = ask(handler, *({"values": each[: series.LENGTH].tolist()} for each in drawn))
    low, middle, high = (
        np.array([answer["quantiles"][name] for answer in answers])
        for name in ("0.1", "0.5", "0.9")
    )
    future = drawn[:, series.LENGTH :]
    assert (np.abs(middle - future) / [5, 80]).mean() < 0.3
    assert 0.5 < ((low <= future) & (future <= high)).mean() < 1


def test_a_step_of_a_forecast_is_explained_by_the_window(forecast: Path) -> None:
    handler = load(Forecaster, forecast / "series", config=QUANTILES)
    window = json.loads((forecast / "window.json").read_text())
    found = explain(handler, window, target="2,1,1", n_steps="2")
    assert (found["label"], found["probability"]) == ("step 3 (1,1)", None)
    assert found["shape"] == [series.LENGTH, series.SERIES]
    assert found["convergence_delta"] == pytest.approx(0, abs=1e-4)
    assert np.abs(np.array(found["attributions"])[:, 0]).max() == 0, "the other series"


def test_a_longer_past_is_cut_and_one_series_is_a_list(tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    save_program(net, ["input:float32[batch=1..4,4]"], tmp_path / "model.pt2")
    (tmp_path / "scaler.json").write_text('{"mean": 10, "std": 2}')
    handler = load(Forecaster, tmp_path)
    past = [1.0, 9, 8, 7, 11, 12]
    (answer,) = ask(handler, past)
    scaled = (torch.tensor([past[-4:]]) - 10) / 2
    assert answer["forecast"] == pytest.approx((net(scaled)[0] * 2 + 10).tolist(), abs=1e-5)
    assert ask(handler, json.dumps({"values": past}).encode()) == [answer]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([[1, 2]] * 3, "the body holds 3 values; expected at least 24, the latest last"),
        ([[1, 2, 3]] * 24, r"holds numbers of shape \[24, 3\]"),
        ({"past": []}, 'the body holds past; expected "values"'),
        ([["a", 2]] * 24, "something else than numbers"),
        (b"no list", "not JSON"),
    ],
    ids=["short", "series", "key", "text", "no JSON"],
)
def test_a_window_that_does_not_fit_is_refused(forecast: Path, body: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ask(load(Forecaster, forecast / "series", config=QUANTILES), body)


@pytest.mark.parametrize(
    ("scaler", "section", "message"),
    [
        ({"mean": [1, 2, 3], "std": [1, 1]}, {}, r"mean is \[1, 2, 3\]; expected 2 finite"),
        ({"mean": 0, "std": 0}, {}, "std is 0; expected 2 finite numbers above 0"),
        ({"mean": 0, "std": 1}, {"quantiles": [2]}, r"quantiles is \[2\]; expected a list"),
        ({"mean": 0, "std": 1}, {"horizon": 2}, "handler.series.horizon is unknown"),
    ],
    ids=["mean", "std", "quantiles", "unknown"],
)
def test_a_wrong_scaler_ends_the_start(
    forecast: Path, tmp_path: Path, scaler: Any, section: dict[str, Any], message: str
) -> None:
    folder = copied(forecast / "series", tmp_path)
    (folder / "scaler.json").write_text(json.dumps(scaler))
    with pytest.raises(LoadError, match=message):
        load(Forecaster, folder, config={"series": section})
