"""Sounds in: decode, mix, resample, normalise; labels or a text out."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.handler_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, VOCABULARY_FILE
from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.base.extras import how_to_install
from modelyard.handlers.base import BaseHandler, Classifier, Inputs
from modelyard.handlers.body import body_of, decode_base64
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors, ranges_of
from modelyard.handlers.explain.draw.bars import Bar, Values, largest
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.explain.request.targets import Target, at_place
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.folder import read_json_file, read_processor
from modelyard.handlers.models.rows import (
    first_output,
    read_flag,
    read_numbers,
    read_section,
    read_whole,
)
from modelyard.handlers.tasks.text_handler import role_of

RATE = 16_000
SECONDS = 30
"""Longest sound, where the settings say nothing else."""
MOST_SAMPLES = 50_000_000
"""Most samples of a file, in all channels: 200 MB as they are decoded."""
MOST_RATE = 384_000

FILES = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "OGG"}
"""How files begin that are read."""

FRAMES_PER_SECOND = 50
"""Frames per second of explanations, whose values are summed over frames."""

_RAW_EXTRACTORS = ("Wav2Vec2FeatureExtractor", "EncodecFeatureExtractor", "")
"""Processors that leave a sound a row of samples."""
_VARIANCE = 1e-7
"""Added under the root, as transformers does: silence is divided by something."""


class AudioHandler(BaseHandler):
    """Serve a model of samples (N, T), or (N, 1, T); answers are the model's numbers.

    A request's body is a WAV, FLAC or OGG file, the base64 text of one, or a JSON list of samples
    at the model's rate. Several channels become their mean. Files need soundfile and soxr, which
    `modelyard[audio]` brings.

    `handler.audio` of model-config.yaml: `rate` (samples per second of the model), `normalize`
    (give a sound the mean 0 and the variance 1), `seconds` (the longest that is taken). Without the
    first two, Hugging Face's `preprocessor_config.json` in the archive says them.
    """

    default_aggregate: ClassVar[str] = "sum"
    fills_rows: ClassVar[bool] = True
    section_keys: ClassVar[tuple[str, ...]] = ("rate", "normalize", "seconds")
    """Keys of `handler.audio`."""

    def __init__(self) -> None:
        super().__init__()
        self.section: Mapping[str, Any] = {}
        """`handler.audio`."""
        self.rate, self.seconds = RATE, SECONDS
        self.normalizes = False
        self.roles: tuple[str, ...] = ()
        """What each input of the model is: sound or mask."""
        self.lengths: list[int] = []
        """Samples of each row of the current batch, without what fills it."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its `handler.audio`; refuse what does not fit the model."""
        super().initialize(context)
        self.section = read_section(self.handler_settings, "audio", self.section_keys)
        file, extractor = read_processor(Path(context.system_properties["model_dir"])) or ("", {})
        kind = str(extractor.get("feature_extractor_type") or "")
        if kind not in _RAW_EXTRACTORS and "rate" not in self.section:
            raise LoadError(
                f"{file} asks for a {kind}, which makes more of a sound than samples; this handler "
                "serves models of samples: write one of your own"
            )
        rate = self.section.get("rate", extractor.get("sampling_rate", RATE))
        self.rate = read_whole("handler.audio.rate", rate, 1000)
        self.seconds = read_whole("handler.audio.seconds", self.section.get("seconds", SECONDS))
        normalizes = self.section.get("normalize", extractor.get("do_normalize", False))
        self.normalizes = read_flag("handler.audio.normalize", normalizes)
        self.made_by = "handler.audio.normalize" if self.normalizes else ""
        self.roles = tuple("sound" if spec.is_float else role_of(spec.name) or ""
                           for spec in self.inputs)  # fmt: skip
        if sorted(self.roles) not in (["sound"], ["mask", "sound"]) or not _is_sound(self._sound()):
            takes = ", ".join(map(str, self.inputs))
            raise LoadError(
                f"the artifact takes {takes}; expected one float input [batch, samples], and at "
                "most an attention_mask"
            )
        _import_libraries()

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn sounds into samples (N, T); with a mask, rows are filled up to the longest.

        Raises:
            BadInput: a body that is not a sound, or is too long.
            InputMismatch: sounds of different length in one batch, for a model without a mask.
        """
        sounds = [self._each(at, self._read_sound, row) for at, row in enumerate(data)]
        self.lengths = [len(sound) for sound in sounds]
        shape = self._sound().shape
        least = shape[-1].min if isinstance(shape[-1], Dim) else shape[-1]
        longest = max([least, *self.lengths]) if "mask" in self.roles else least
        rows = []
        for sound in sounds:
            missing = (0, max(0, longest - len(sound)))
            filled = np.pad(sound, missing)
            parts = {
                "sound": filled[None] if len(shape) == 3 else filled,
                "mask": np.pad(np.ones(len(sound), np.int64), missing),
            }
            rows.append([parts[role] for role in self.roles])
        return self._gather(rows, range(len(rows)))

    def window(self, sizes: torch.Size, side: int | None) -> tuple[int, ...]:
        """Return a frame of all channels."""
        return (*sizes[:-1], side or self._frame)

    def scales(self, inputs: Tensor) -> Tensor:
        """Return the range of all samples of a sound."""
        return ranges_of(inputs)

    def aggregate(self, attributions: Tensor) -> Tensor:
        """Sum attributions (T) or (1, T) over frames of a fiftieth of a second."""
        samples = attributions.flatten()
        missing = -len(samples) % self._frame
        return torch.nn.functional.pad(samples, (0, missing)).view(-1, self._frame).sum(1)

    def describe(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return how many seconds of the sound a value stands for."""
        if explanation.options.layer is not None:
            return {}
        is_sum = (explanation.options.aggregate or self.default_aggregate) == "sum"
        return {"seconds_per_value": (self._frame if is_sum else 1) / self.rate}

    def bars(self, index: int, inputs: Tensors, explanation: Explanation) -> list[Bar]:
        """Return the frames by the second at which they begin."""
        if explanation.options.layer is not None:
            return super().bars(index, inputs, explanation)
        size = self.describe(index, explanation)["seconds_per_value"]
        errors = None if explanation.errors is None else explanation.errors[0]
        sound = Values(explanation.attributions[0], errors)
        return largest({"sound": sound}, lambda _, place: f"{place[-1] * size:.2f} s")

    @property
    def _frame(self) -> int:
        return max(1, self.rate // FRAMES_PER_SECOND)

    def _sound(self) -> TensorSpec:
        return self.inputs[self.roles.index("sound")] if "sound" in self.roles else TensorSpec("")

    def _read_sound(self, row: Mapping[str, Any]) -> np.ndarray:
        """Return the samples (T,) of one request at the model's rate."""
        body = body_of(row)
        if isinstance(body, str):
            body = decode_base64(body, "a file")
        if isinstance(body, bytes | bytearray):
            samples = decode_sound(body, self.rate, self.seconds)
        else:
            samples = read_numbers(TensorSpec("sound", "float32", (1, Dim("samples"))), body)
        size = self._sound().shape[-1]
        most = min(size.max if isinstance(size, Dim) else size, self.seconds * self.rate)
        if not 1 <= len(samples) <= most:
            raise BadInput(
                f"the sound has {len(samples) / self.rate:.2f} s; expected more than 0 and at most "
                f"{most / self.rate:.2f}"
            )
        if self.normalizes:
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + _VARIANCE)
        return samples.astype(np.float32)


class AudioClassifier(Classifier, AudioHandler):
    """Serve a classifier of sounds."""


@dataclass(frozen=True)
class Alphabet:
    """What the outputs of a CTC model stand for."""

    tokens: Mapping[int, str]
    blank: int
    """The output that stands for no character; it parts two that are equal."""
    delimiter: str
    """The token between words."""
    is_lower: bool
    """Whether the text is given in lower case."""


class SpeechRecognizer(AudioHandler):
    """Serve a CTC model, as wav2vec2: the likeliest token of every frame, repeats put together.

    The answer is {"text": …, "words": [{"word", "start", "end"}, …]}, in seconds. The archive holds
    `vocab.json` (token → output) or a `tokenizer.json`. `handler.audio.blank` and `.delimiter` of
    model-config.yaml name the tokens for nothing and for a space, `<pad>` and `|` without
    `tokenizer_config.json`.
    """

    section_keys: ClassVar[tuple[str, ...]] = (*AudioHandler.section_keys, "blank", "delimiter")
    class_dim: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.alphabet = Alphabet({}, 0, "|", is_lower=False)

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.audio` and its alphabet."""
        super().initialize(context)
        folder = Path(context.system_properties["model_dir"])
        self.alphabet = read_alphabet(folder, self.section)

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, T, V) into the text of each sound."""
        logits = first_output(outputs, 3, "a recogniser needs logits (N, T, V)")
        best = logits.argmax(2).tolist()
        longest = max(self.lengths)
        return [
            self._text(row, length, longest) for row, length in zip(best, self.lengths, strict=True)
        ]

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find the frame (T, V) that is surest of a token; `predicted` is the surest of all."""
        names = {token: at for at, token in self.alphabet.tokens.items()}
        chances = scores.softmax(1)
        if inside is not None:
            chances[~inside] = 0
        if target == "predicted":
            chances[:, self.alphabet.blank] = 0
            return [at_place(int(chances.argmax()))]
        if target in names:
            frame = int(chances[:, names[target]].argmax())
            return [at_place(frame * scores.shape[1] + names[target])]
        return None

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return the token and the number of its frame."""
        return f'"{self.alphabet.tokens.get(place[1], place[1])}" in frame {place[0]}'

    def _text(self, best: Sequence[int], length: int, longest: int) -> dict[str, Any]:
        per_frame = longest / len(best) / self.rate
        frames = best[: -(-len(best) * length // longest)]
        words: list[dict[str, Any]] = []
        is_inside, at = False, 0
        text = ""
        for token, group in groupby(frames):
            start, at = at, at + len(list(group))
            if token == self.alphabet.blank:
                continue
            letter = self.alphabet.tokens.get(token, "")
            text += " " if letter == self.alphabet.delimiter else letter
            if letter == self.alphabet.delimiter:
                is_inside = False
            elif is_inside:
                words[-1]["word"] += letter
                words[-1]["end"] = round(at * per_frame, 3)
            else:
                ends = {"start": round(start * per_frame, 3), "end": round(at * per_frame, 3)}
                words.append({"word": letter, **ends})
                is_inside = True
        if self.alphabet.is_lower:
            text = text.lower()
            words = [{**word, "word": word["word"].lower()} for word in words]
        return {"text": text.strip(), "words": words}


def read_alphabet(folder: Path, section: Mapping[str, Any]) -> Alphabet:
    """Read what a CTC model's outputs stand for, from the files of its tokenizer.

    Raises:
        LoadError: there is none, or it has no token for nothing.
    """
    vocabulary = read_json_file(folder / VOCABULARY_FILE)
    if vocabulary is None:
        whole = read_json_file(folder / TOKENIZER_FILE) or {}
        model = whole.get("model") if isinstance(whole, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not all(type(at) is int for at in vocabulary.values()):
        raise LoadError(
            f"the archive holds no {VOCABULARY_FILE} of tokens and their outputs, nor a "
            f"{TOKENIZER_FILE} with one; pack it with --from FOLDER or --extra-files"
        )
    config = read_json_file(folder / TOKENIZER_CONFIG_FILE)
    config = config if isinstance(config, dict) else {}
    blank = section.get("blank", _content(config.get("pad_token", "<pad>")))
    if blank not in vocabulary:
        raise LoadError(
            f"the vocabulary has no {blank!r}, which would stand for nothing; name that token as "
            "handler.audio.blank"
        )
    delimiter = section.get("delimiter", _content(config.get("word_delimiter_token", "|")))
    tokens = {at: token for token, at in vocabulary.items()}
    return Alphabet(tokens, vocabulary[blank], str(delimiter), bool(config.get("do_lower_case")))


def decode_sound(body: bytes | bytearray, rate: int, seconds: int) -> np.ndarray:
    """Return the samples (T,) float32 of a file at a rate, the mean of its channels.

    Raises:
        BadInput: it is none of `FILES`, damaged, or longer than `seconds`.
    """
    soundfile, soxr = _import_libraries()
    if bytes(body[:4]) not in FILES:
        raise BadInput(
            f"the body ({len(body)} bytes) is not a sound; send one file of "
            f"{', '.join(FILES.values())}"
        )
    try:
        with soundfile.SoundFile(io.BytesIO(body)) as file:
            own = file.samplerate
            most = seconds * own
            if not 1 <= own <= MOST_RATE or most * file.channels > MOST_SAMPLES:
                raise BadInput(
                    f"the sound has {file.channels} channels of {own} samples a second; that is "
                    f"too much for {seconds} s"
                )
            if file.frames > most:
                raise BadInput(
                    f"the sound has {file.frames / own:.2f} s; expected at most {seconds}"
                )
            # What the file says of its length is not to be trusted.
            samples = file.read(most, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        raise BadInput(f"the body cannot be read as a sound: {error}") from error
    mixed: np.ndarray = samples.mean(axis=1)
    if not np.isfinite(mixed).all():
        raise BadInput("the sound holds samples that are not finite numbers")
    if own != rate and len(mixed):
        mixed = soxr.resample(mixed, own, rate)
    return mixed


def _import_libraries() -> tuple[Any, Any]:
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: libsndfile is not there
        advice = isinstance(error, ImportError) and how_to_install(error)
        raise LoadError(f"sounds need soundfile and soxr: {advice or error}") from error
    return soundfile, soxr


def _is_sound(spec: TensorSpec) -> bool:
    dims = len(spec.shape)
    return not spec.dtype or dims == 2 or (dims == 3 and spec.shape[1] == 1)


def _content(token: Any) -> Any:
    """Return a special token's text, which may stand in an object of its own."""
    return token.get("content") if isinstance(token, dict) else token
