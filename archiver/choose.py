"""An artifact's report and its checkpoint's folder → the built-in handler, and the files to pack.

The signature says which handlers could serve the model, and the class of a Hugging Face model
which of them is meant. The files that the handler reads are taken from the folder as they are.
"""

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.handler_files import (
    CONFIG_FILE,
    FEATURES_FILE,
    LABELS_FILE,
    MAX_JSON_BYTES,
    PROCESSOR_FILES,
    SCALER_FILE,
    TOKEN_IDS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
)
from modelyard.archiver.report import Report
from modelyard.archiver.signature import Signature, TensorSpec
from modelyard.archiver.untrusted.json import parse_json

AUTO = "auto"

LABELS = (LABELS_FILE, CONFIG_FILE)
"""Files that name the classes."""
_TOKENIZER = (TOKENIZER_FILE,)

_CLASSES = ("logits", "probabilities", "probs", "scores")
"""Names that an output has whose numbers are of classes."""
_LIBRARY = "transformers"
_SAMPLES = 4000
"""Length of a row from which on it is likelier a sound than features of a table."""


@dataclass(frozen=True)
class Rule:
    """When a built-in handler serves a model, and which files it reads."""

    handler: str
    takes: str
    """What the model takes, a word of `_inputs_of`."""
    gives: Sequence[str]
    """What the first output may be, or the first two: words of `_outputs_of`."""
    endings: Sequence[str]
    """Ends of the names of transformers' classes that are made for it."""
    needs: Sequence[str] = ()
    """Files without which the handler does not start, one of them."""
    brings: Sequence[str] = LABELS
    """Files that it reads where they are there."""
    has_labels: bool = False


RULES = (
    Rule("audio_classifier", "sound", ["classes"], ["ForSequenceClassification",
         "ForAudioClassification"], brings=(*LABELS, *PROCESSOR_FILES), has_labels=True),
    Rule("fill_mask", "text", ["places"], ["ForMaskedLM"], _TOKENIZER),
    Rule("forecaster", "series", ["places", "classes", "map"], ["ForPrediction"],
         brings=(SCALER_FILE,)),
    Rule("forecaster", "numbers", ["places", "classes"], [], (SCALER_FILE,), brings=()),
    Rule("generate", "text and its cache", ["classes"], [], _TOKENIZER, brings=()),
    Rule("image_classifier", "image", ["classes"], ["ForImageClassification"],
         brings=(*LABELS, *PROCESSOR_FILES), has_labels=True),
    Rule("image_encoder", "image", ["classes", "places"], ["Model"], brings=PROCESSOR_FILES),
    Rule("image_segmenter", "image", ["map"], ["ForSemanticSegmentation"],
         brings=(*LABELS, *PROCESSOR_FILES), has_labels=True),
    Rule("image_text", "image and text", ["classes"], ["Model"], _TOKENIZER,
         brings=(CONFIG_FILE, *PROCESSOR_FILES)),
    Rule("object_detector", "image", ["boxes"], ["ForObjectDetection"],
         brings=(*LABELS, *PROCESSOR_FILES), has_labels=True),
    Rule("question_answering", "text", ["spans"], ["ForQuestionAnswering"], _TOKENIZER),
    Rule("speech_recognizer", "sound", ["places"], ["ForCTC"], (VOCABULARY_FILE, TOKENIZER_FILE),
         brings=(CONFIG_FILE, TOKENIZER_CONFIG_FILE, *PROCESSOR_FILES)),
    Rule("tabular", "numbers", ["classes"], [], (FEATURES_FILE,), has_labels=True),
    Rule("text", "text", ["classes"], ["ForSequenceClassification"], _TOKENIZER, has_labels=True),
    Rule("text_encoder", "text", ["classes", "places"], ["Model"], _TOKENIZER, brings=()),
    Rule("token_classifier", "text", ["places"], ["ForTokenClassification"], _TOKENIZER,
         has_labels=True),
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The handler, and what is packed for it."""

    handler: str
    reason: str
    files: tuple[Path, ...]
    """Files of the checkpoint's folder."""

    def __str__(self) -> str:
        names = ", ".join(map(_described, self.files))
        packed = f"; from {self.files[0].parent}: {names}" if self.files else ""
        return f"handler {self.handler}: {self.reason}{packed}"


def choose(
    handler: str,
    report: Report | None,
    folder: Path | None,
    packed: Collection[str],
    artifact: Path | None = None,
) -> Choice:
    """Choose the handler, where it is `auto`, and the files of its checkpoint's folder.

    Args:
        handler: a built-in one, or `auto`.
        report: report of the artifact.
        folder: folder of the checkpoint; without one, the folder that the report's command names.
        packed: names of the files that are packed anyway, which come before those of the folder.
        artifact: the file, for messages.

    Raises:
        CannotArchive: no handler fits, several do, or a file that it needs is missing.
    """
    if folder is not None and not folder.is_dir():
        raise CannotArchive(f"--from {folder}: there is no such folder")
    if report is None:
        if artifact is not None and artifact.suffix == ".onnx":
            command = shlex.join(["modelyard", "export", str(artifact), "-o", "build"])
            advice = f"`{command}` checks the file and writes it with one"
        else:
            advice = "write both with `modelyard export`, or name the handler with --handler"
        raise CannotArchive(
            f"the handler is chosen by the artifact's report, which says what the model takes, and "
            f"there is none beside it: {advice}"
            if handler == AUTO
            else f"--from needs the artifact's report, which says what the model is: {advice}"
        )
    folder = folder or _folder_of(report)
    if folder is None and report.model.startswith(_LIBRARY):
        raise CannotArchive(
            f"the checkpoint's folder is not here ({report.command or 'the report names none'}); "
            "give it with --from, for its tokenizer, processor and labels"
        )
    rule, reason = _choose(handler, report, folder, packed)
    files = list(_files(rule, folder, packed))
    have = {*packed, *(file.name for file in files), *([FEATURES_FILE] if report.table else ())}
    if rule.needs and not have & set(rule.needs):
        seen = f"{folder} holds none" if folder else "the checkpoint's folder is not known"
        raise CannotArchive(
            f"the handler {rule.handler} needs {' or '.join(rule.needs)}, and {seen}: give the "
            "folder with --from, or the file with --extra-files"
        )
    return Choice(rule.handler, reason, tuple(files))


def _choose(
    handler: str, report: Report, folder: Path | None, packed: Collection[str]
) -> tuple[Rule, str]:
    if handler != AUTO:
        if (known := _rule(handler)) is None:
            names = ", ".join(rule.handler for rule in RULES)
            raise CannotArchive(
                f"--from goes with a built-in handler that reads files of the folder ({names}), "
                f"not with {handler}; pack files with --extra-files"
            )
        return known, "as given"
    signature = report.signature
    takes, gives = _inputs_of(signature), _outputs_of(signature)
    found = [rule for rule in RULES if rule.takes in takes and set(rule.gives) & gives]
    name = report.model.rpartition(":")[2] if report.model.startswith(_LIBRARY) else ""
    if report.table and (table := _rule("tabular")):
        return table, "the report names the columns that it takes"
    if by_class := [rule for rule in found if any(name.endswith(end) for end in rule.endings)]:
        found, reason = by_class, f"the model is a {name}"
    else:
        found, reason = _by_files(found, folder, packed, report)
    if len(found) == 1:
        return found[0], reason
    inputs, outputs = (", ".join(map(str, each)) for each in (signature.inputs, signature.outputs))
    shown = f"the model takes {inputs} and gives {outputs}"
    if not found:
        raise CannotArchive(
            f"no built-in handler is made for this model: {shown}; give --handler base_handler "
            "(JSON numbers), or a FILE.py"
        )
    reasons = "; ".join(map(_reason, found))
    raise CannotArchive(
        f"several handlers fit: {reasons}; base_handler for JSON numbers as they are. {shown}; "
        "give one as --handler"
    )


def _rule(handler: str) -> Rule | None:
    return next((rule for rule in RULES if rule.handler == handler), None)


def _reason(rule: Rule) -> str:
    """Return what a handler is for, and the file that it cannot do without."""
    needs = f", with {' or '.join(rule.needs)}" if rule.needs else ""
    gives = " or ".join(_WORDS[each] for each in rule.gives)
    return f"{rule.handler} for {rule.takes} to {gives}{needs}"


def _by_files(
    rules: list[Rule], folder: Path | None, packed: Collection[str], report: Report
) -> tuple[list[Rule], str]:
    """Keep the rules whose files are there, then those with labels where there are labels."""
    by_shape = "by the artifact's inputs and outputs"
    have = {*packed, *(file.name for rule in rules for file in _files(rule, folder, packed))}
    rules = [rule for rule in rules if not rule.needs or have & set(rule.needs)] or rules
    with_labels = [rule for rule in rules if rule.has_labels]
    if with_labels and (LABELS_FILE in have or report.labels):
        return with_labels, f"{by_shape}, and the labels"
    main = report.signature.main
    if with_labels and main and (main.name in _CLASSES or report.probabilities.get(main.name)):
        return with_labels, f"{by_shape}: {main.name} are those of classes"
    return rules, by_shape


def _files(rule: Rule, folder: Path | None, packed: Collection[str]) -> Iterator[Path]:
    """Yield the files of the folder that a handler reads; the first of several for one purpose."""
    names = (*rule.needs, *rule.brings)
    for name in dict.fromkeys(names):
        if folder is not None and name not in packed and (folder / name).is_file():
            yield folder / name


def _folder_of(report: Report) -> Path | None:
    """Return the folder that was exported, where it lies as it did then."""
    words = shlex.split(report.command)
    checkpoint = Path(words[2]) if len(words) > 2 else None
    return checkpoint if checkpoint is not None and checkpoint.is_dir() else None


_WORDS = {
    "classes": "one row of numbers",
    "places": "a row for each place",
    "map": "a map for each class",
    "boxes": "logits and boxes",
    "spans": "logits of starts and ends",
}


def _inputs_of(signature: Signature) -> set[str]:
    """Return what the inputs may be: text, its cache, an image, sound, a series, numbers.

    Complex ones are none of these.
    """
    if signature.has_cache:
        return {"text and its cache"}
    if any(spec.view for spec in signature.inputs):
        return set()
    whole = [spec for spec in signature.inputs if not spec.is_float]
    real = [spec for spec in signature.inputs if spec.is_float]
    has_ids = len(whole) == 1 or any(spec.name in TOKEN_IDS for spec in whole)
    is_text = has_ids and all(len(spec.shape) == 2 for spec in whole)
    if not real:
        return {"text"} if is_text else set()
    shape = real[0].shape
    is_image = len(shape) == 4 and shape[1] in (1, 3)
    if len(real) > 1 or (whole and not is_text and not all("mask" in each.name for each in whole)):
        return set()
    if is_image:
        if is_text:
            return {"image and text"}
        return set() if whole else {"image"}
    if len(shape) == 2:
        sounds = {"sound"} if _is_long(real[0]) else set()
        return sounds if whole else {*sounds, "numbers"}
    return {"series"} if len(shape) == 3 and not whole else set()


def _is_long(spec: TensorSpec) -> bool:
    """Return whether a row may be the samples of a sound: many, or of any number."""
    size = spec.shape[1]
    return size >= _SAMPLES if isinstance(size, int) else size.max >= _SAMPLES // 4


def _outputs_of(signature: Signature) -> set[str]:
    """Return what the outputs may be, of `_WORDS`."""
    if any(spec.view for spec in signature.outputs):
        return set()
    shapes = [spec.shape for spec in signature.outputs]
    dims = [len(shape) for shape in shapes]
    if dims[:2] == [3, 3] and shapes[1][2] == 4:
        return {"boxes"}
    is_text = any(not spec.is_float for spec in signature.inputs)
    if is_text and dims[:2] == [2, 2] and not isinstance(shapes[0][1], int):
        return {"spans"}
    main = len(signature.main.shape) if signature.main else 0
    return {{2: "classes", 3: "places", 4: "map"}[main]} if 2 <= main <= 4 else set()


def _described(file: Path) -> str:
    """Return a file's name, and of a configuration how many labels it has."""
    try:
        content = parse_json(file.read_bytes(), MAX_JSON_BYTES) if file.name in LABELS else None
    except (OSError, ValueError) as error:
        raise CannotArchive(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        return file.name
    labels = content if file.name == LABELS_FILE else content.get("id2label")
    return f"{file.name} ({len(labels)} labels)" if isinstance(labels, dict) else file.name
