"""Text in, labels out; explanations say what each token did.

A body is text in our form, or in those that clients of Hugging Face send: {"inputs": …}, with a
text, an object or a list inside, and a list of texts by itself.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.handler_files import MASKS, TOKEN_IDS, TOKENIZER_FILE, TYPES
from modelyard.archiver.signature import UNLIMITED, Dim
from modelyard.base.extras import how_to_install
from modelyard.handlers.base import Classifier, Inputs
from modelyard.handlers.body import body_of, decode_text, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.draw import bars, page, tokens
from modelyard.handlers.explain.explanation import Explanation, as_lists
from modelyard.handlers.explain.request.options import Region
from modelyard.handlers.models.invariant import Invariant
from modelyard.handlers.models.rows import read_section
from modelyard.handlers.proof.mutation import Mutation
from modelyard.handlers.tasks.lists import Lists

MAX_LENGTH = 512
"""Tokens of a request, where neither the settings nor the artifact say less."""
MAX_CHARACTERS = 1_000_000

PAD_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>")


class TextHandler(Lists, Classifier):
    """Serve a classifier of token ids; the archive holds its tokenizer (`tokenizer.json`).

    A request's body is text, a JSON string, or {"text": …, "text_pair": …} for a model that
    compares two; also {"inputs": …} with one of these inside, and a list, which a list answers. The
    tokenizer's file is one of the `tokenizers` package, which the archive names among its
    requirements. `handler.text` of model-config.yaml: `tokenizer` (the file), `max_length` (more
    tokens are cut off), `pad` (the token that fills rows), `max_batch_tokens`
    (docs/embeddings.md).
    """

    formats: ClassVar[tuple[str, ...]] = ("json", "html", "npy")
    default_baseline: str = "pad"
    default_aggregate: ClassVar[str] = "sum"
    section_keys: ClassVar[tuple[str, ...]] = (
        "tokenizer", "max_length", "pad", "max_batch_tokens",
    )  # fmt: skip
    """Keys of `handler.text`."""
    listed = "text"
    parts: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """Keys of a request that is a JSON object."""
    least_parts: ClassVar[int] = 1
    """How many of them every request has; with one, a request may be the text itself."""

    def __init__(self) -> None:
        super().__init__()
        self.section: Mapping[str, Any] = {}
        """`handler.text`."""
        self.tokenizer: Any = None
        self.pad_id = 0
        self.fewest = 0
        """Tokens of a row at least: all, where a row is not to depend on what is beside it."""
        self.kept: Tensor = torch.empty(0, dtype=torch.int64)
        """Ids of special tokens, which a baseline keeps."""
        self.roles: tuple[str, ...] = ()
        """What each input of the model is: ids, mask or types."""
        self.texts: list[tuple[str, ...]] = []
        """Texts of the current batch, one for each of `parts` that a request has."""
        self.encodings: list[Any] = []
        """Encodings of the current batch, one per row of the model's inputs."""
        self.owners: list[int] = []
        """Request that each of `encodings` belongs to."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer.

        Raises:
            LoadError: the package or the file is missing, or the model's inputs are none of text.
        """
        super().initialize(context)
        self.section = section = read_section(self.handler_settings, "text", self.section_keys)
        self.roles = tuple(self._role(spec.name) for spec in self.inputs)
        if self.roles.count("ids") != 1:
            takes = ", ".join(map(str, self.inputs))
            raise LoadError(
                f"the artifact takes {takes}; expected token ids as {' or '.join(TOKEN_IDS)}"
            )
        self.embedded = self.roles.index("ids")
        folder = Path(context.system_properties["model_dir"])
        self.made_by = section.get("tokenizer", TOKENIZER_FILE)
        self.tokenizer = load_tokenizer(folder / self.made_by)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_length(section))
        self.pad_id = self._find_pad(section.get("pad"))
        self.kept = torch.tensor(_special_ids(self.tokenizer), dtype=torch.int64)
        if isinstance(self.model, Invariant):
            shape = self.inputs[self.embedded].shape
            length = shape[1] if len(shape) == 2 else None
            self.fewest = self.tokenizer.truncation["max_length"]
            self.model.learn({length.name: self.fewest} if isinstance(length, Dim) else {})

    def mutations(self) -> Iterator[Mutation]:
        """Yield a shorter text, where long ones are cut off, and another case."""
        yield from super().mutations()
        from tokenizers import Tokenizer, normalizers

        shorter, other = (Tokenizer.from_str(self.tokenizer.to_str()) for _ in range(2))
        if cut := self.tokenizer.truncation:  # windows are not cut off
            most = max(1, cut["max_length"] // 2)
            shorter.enable_truncation(most)
            yield Mutation("truncation", {"tokenizer": shorter}, f"of more than {most} tokens")
        was = other.normalizer
        lower = normalizers.Lowercase()
        before = [other.encode(text).ids for text in ("Text", "text")]
        if before[0] == before[1]:
            other.normalizer = normalizers.NFC()
        else:
            other.normalizer = normalizers.Sequence([was, lower] if was else [lower])
        yield Mutation("case", {"tokenizer": other}, "with capitals")

    def read_list(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the texts of a request that holds a list of them."""
        body = read_body(row, self.parts)
        return body if isinstance(body, list) else None

    def check_listed(self, body: Any) -> None:
        """Refuse what is not a text."""
        self._read_texts({"body": body})

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn texts into ids (N, L), filled up to the longest, with mask and types if asked for.

        Raises:
            BadInput: a body that is not text.
            InputMismatch: texts of different length in one batch, for a model without a mask.
        """
        self.texts = [self._each(at, self._read_texts, row) for at, row in enumerate(data)]
        self.owners = list(range(len(self.texts)))
        self.encodings = self.encode(self.texts)
        return self.fill()

    def fill(self) -> Inputs:
        """Turn the encodings of the batch into ids (N, L), as `preprocess`."""
        low, high = self._lengths()
        longest = max([low, self.fewest, *map(len, self.encodings)])
        if "mask" not in self.roles and low != high:
            longest = low
        rows = [[self._row(role, each, longest) for role in self.roles] for each in self.encodings]
        return self._gather(rows, self.owners)

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[Any]:
        """Return the tokens of each request; what is too long is cut off."""
        encodings: list[Any] = self.tokenizer.encode_batch(
            [row[0] if len(row) == 1 else row for row in texts]
        )
        return encodings

    def baselines(self, name: str, inputs: Tensors, seed: int) -> Tensors:
        """Return the request with every token but the special ones replaced by padding."""
        if name != "pad":
            raise BadInput(f'baseline is "{name}"; expected pad or zero (embeddings) for text')
        ids = inputs[self.embedded or 0]
        filled = ids.where(torch.isin(ids, self.kept.to(ids)), self.pad_id)
        return tuple(filled if at == self.embedded else each for at, each in enumerate(inputs))

    def aggregate(self, attributions: Tensor) -> Tensor:
        """Sum attributions (L, E) over the embedding; those of methods on ids are (L,) already."""
        return attributions.sum(-1) if attributions.dim() > 1 else attributions

    def describe(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return one number per token with its place in the text, without what fills the row."""
        if explanation.options.layer is not None:
            return {}
        (attributions,) = explanation.attributions
        encoding = self.encodings[index]
        is_alone = len(self.texts[index]) == 1
        own = attributions[: len(encoding)]
        errors: dict[str, Any] = {}
        if explanation.options.errors and explanation.errors is not None:
            errors["errors"] = as_lists(explanation.errors[0][: len(encoding)])
        listed = [
            {
                "token": token,
                "start": start,
                "end": end,
                "is_special": bool(special),
                "word": word,
                "attribution": value,
                **({} if is_alone or part is None else {"part": self.parts[part]}),
            }
            for token, (start, end), special, word, part, value in zip(
                encoding.tokens,
                encoding.offsets,
                encoding.special_tokens_mask,
                encoding.word_ids,
                encoding.sequence_ids,
                as_lists(self.aggregate(own)),
                strict=True,
            )
        ]
        _, words = self._words(index, listed, explanation)
        return {
            "shape": list(own.shape),
            "attributions": as_lists(own),
            **errors,
            "truncated": self._is_truncated(index),
            "tokens": listed,
            "words": [
                {
                    "word": word.text,
                    "attribution": word.value,
                    **({"error": word.error} if explanation.options.errors else {}),
                }
                for word in words
            ],
        }

    def warnings(self, index: int) -> tuple[str, ...]:
        """Say where a text that is too long was cut off."""
        if not self._is_truncated(index):
            return ()
        encoding = self.encodings[index]
        ends = {
            part: end
            for part, (_, end) in zip(encoding.sequence_ids, encoding.offsets, strict=True)
            if part is not None
        }
        cut = " and ".join(
            f"{self.parts[part]} after {ends.get(part, 0)} of {len(text)} characters"
            for part, text in enumerate(self.texts[index])
            if ends.get(part, 0) < len(text)
        )
        return (f"the model takes {len(encoding)} tokens and did not see the rest: {cut}",)

    def _is_truncated(self, index: int) -> bool:
        return bool(getattr(self.encodings[index], "overflowing", ()))

    def page(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw the text with a colour behind each word."""
        if explanations[0].options.layer is not None:
            return super().page(index, inputs, explanations)
        parts = []
        for each in explanations:
            answer = self.fields_of(index, each)
            text, words = self._words(index, answer["tokens"], each)
            figure = tokens.figure(text, words, each.strength)
            if strongest := tokens.strongest(words):
                figure += f"<h3>Strongest words</h3>{bars.figure(strongest, None, each.strength)}"
            drawn = bars.drawn_of([word.as_bar for word in words], "word", each.sides)
            parts.append(page.part_of(each, answer, drawn, figure))
        return page.render(parts)

    def groups(self, index: int, sizes: torch.Size) -> Tensor | None:
        """Return the word that each token is of, for ids (L,) and embeddings (L, E)."""
        encoding = self.encodings[index]
        if not sizes or len(encoding) > sizes[0]:
            return None
        words = list(zip(encoding.sequence_ids, encoding.word_ids, strict=True))
        # A tokenizer that does not part words first takes a whole text for one.
        is_parted = len(set(words) - {(None, None)}) > len(self.texts[index])
        keys: list[object] = [
            at if word is None or not is_parted else (part, word)
            for at, (part, word) in enumerate(words)
        ]
        keys += range(len(keys), sizes[0])
        begins = torch.tensor([at > 0 and key != keys[at - 1] for at, key in enumerate(keys)])
        line = begins.long().cumsum(0)
        return line.view(-1, *[1] * (len(sizes) - 1)).expand(sizes)

    def find_region(self, index: int, region: Region, sizes: tuple[int, ...]) -> Tensor:
        """Return which tokens (L,) are of a span of characters in the text.

        In a request of several texts, those of the last are meant: the context of a question.

        Raises:
            BadInput: there are none.
        """
        if len(sizes) != 1 or len(region.box) != 2:
            return super().find_region(index, region, sizes)
        encoding = self.encodings[index]
        begin, end = region.box
        last = len(self.texts[index]) - 1
        spans = zip(encoding.offsets, encoding.sequence_ids, strict=True)
        own = [at for at, ((start, stop), part) in enumerate(spans)
               if part == last and start < end and stop > begin]  # fmt: skip
        if not own:
            raise BadInput(
                f"region is {region.text}; no token of {self.parts[last]} is there, which has "
                f"{len(self.texts[index][last])} characters"
            )
        inside = torch.zeros(sizes, dtype=torch.bool)
        inside[own] = True
        return inside

    def word_at(self, index: int, token: int) -> str:
        """Return what a token of request `index` stands for in its text."""
        encoding = self.encodings[index]
        (start, end), part = encoding.offsets[token], encoding.sequence_ids[token]
        return str(encoding.tokens[token] if part is None else self.texts[index][part][start:end])

    def _words(
        self, index: int, listed: Sequence[Mapping[str, Any]], explanation: Explanation
    ) -> tuple[str, list[tokens.Word]]:
        """Return the parts of a request as one text, and its words with their places there."""
        texts, first = self.texts[index], self.parts[0]
        errors: list[float | None] = [None] * len(listed)
        if explanation.errors is not None:
            errors = as_lists(self.aggregate(explanation.errors[0][: len(listed)]))
        moved = []
        for token, error in zip(listed, errors, strict=True):
            shift = 0 if token.get("part", first) == first else len(texts[0]) + 1
            places = {"start": token["start"] + shift, "end": token["end"] + shift}
            moved.append({**token, **places, "error": error})
        text = "\n".join(texts)
        return text, tokens.words_of(text, moved)

    def _read_texts(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts of one request, in the order of `parts`."""
        body = read_body(row, self.parts)
        if isinstance(body, str) and self.least_parts == 1:
            body = {self.parts[0]: body}
        names = self.parts[: len(body)] if isinstance(body, dict) else ()
        if len(names) < self.least_parts or set(names) != set(body):
            form = "{" + ", ".join(f'"{part}": "…"' for part in self.parts) + "}"
            seen = (
                f"a list of {len(body)}"
                if isinstance(body, list)
                else "an object of " + (", ".join(map(str, body)) or "nothing")
                if isinstance(body, dict)
                else f"a {type(body).__name__}"
            )
            alone = "text, a JSON string or " if self.least_parts == 1 else ""
            raise BadInput(f"the body is {seen}; expected {alone}{form}")
        texts = tuple(body[name] for name in names)
        for name, text in zip(names, texts, strict=True):
            if not isinstance(text, str):
                raise BadInput(f"{name} is a {type(text).__name__}; expected text")
        if (length := sum(map(len, texts))) > MAX_CHARACTERS:
            raise BadInput(f"the text has {length} characters; the limit is {MAX_CHARACTERS}")
        return texts

    def _role(self, name: str) -> str:
        role = "ids" if len(self.inputs) == 1 else role_of(name)
        if role is None:
            known = ", ".join((*TOKEN_IDS, *MASKS, *TYPES))
            raise LoadError(f'the artifact has an input "{name}"; expected some of {known}')
        return role

    def _lengths(self) -> tuple[int, int]:
        """Return the fewest and the most tokens that the artifact takes."""
        shape = self.inputs[self.embedded or 0].shape
        if len(shape) != 2:
            return 1, MAX_LENGTH
        length = shape[1]
        if isinstance(length, Dim):
            return max(1, length.min), MAX_LENGTH if length.max == UNLIMITED else length.max
        return length, length

    def max_length(self, section: Mapping[str, Any]) -> int:
        """Return how many tokens a text has at most, by the artifact or a section that says less.

        Raises:
            LoadError: the artifact takes no texts of the length that the section says.
        """
        most = self._lengths()[1]
        length = section.get("max_length", min(most, MAX_LENGTH))
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= most:
            raise LoadError(
                f"handler.text.max_length is {length!r}; expected a whole number from 1 to {most}, "
                "which the artifact takes"
            )
        return length

    def _find_pad(self, name: str | None) -> int:
        tried = PAD_TOKENS if name is None else (name,)
        found = (self.tokenizer.token_to_id(token) for token in tried)
        id = next((each for each in found if each is not None), None)
        if id is None:
            raise LoadError(
                f"the tokenizer knows no {' or '.join(tried)}; name the token that fills rows as "
                "handler.text.pad"
            )
        return int(id)

    def _row(self, role: str, encoding: Any, length: int) -> np.ndarray:
        values, fill = {
            "ids": (encoding.ids, self.pad_id),
            "mask": (encoding.attention_mask, 0),
            "types": (encoding.type_ids, 0),
        }[role]
        return np.array([*values, *[fill] * (length - len(values))], dtype=np.int64)


def role_of(name: str) -> str | None:
    """Return what an input of this name is: ids, mask or types.

    Of a model of one input, its name does not matter.
    """
    roles = {"ids": TOKEN_IDS, "mask": MASKS, "types": TYPES}
    return next((role for role, names in roles.items() if name in names), None)


def load_tokenizer(path: Path) -> Any:
    """Read a tokenizer's file.

    Raises:
        LoadError: the package or the file is missing, or it is another file.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LoadError(
            f"this handler needs the package tokenizers: {how_to_install(error) or error}; or name "
            "it among the archive's requirements and start with --install-requirements"
        ) from error
    if not path.is_file():
        raise LoadError(
            f"the archive holds no {path.name}; pack the tokenizer's file with --extra-files"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise LoadError(f"{path.name} is not a file of the tokenizers package: {error}") from error


def _special_ids(tokenizer: Any) -> list[int]:
    """Return the ids of tokens that frame a text; one that stands for an unknown word is a word."""
    unknown = getattr(tokenizer.model, "unk_token", None)
    return [
        id
        for id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content != unknown
    ]


INPUTS, PARAMETERS = "inputs", "parameters"


def read_body(row: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return a text, an object, or the list of several of them, whatever the content type says.

    Args:
        row: the request.
        names: keys of an object.

    Raises:
        BadInput: the body is empty, not text, or has parameters beside its `inputs`.
    """
    body = body_of(row)
    if isinstance(body, bytes | bytearray):
        body = decode_text(body)
        if body.lstrip()[:1] in ('"', "{", "["):
            # Else it is a text that begins with such a character.
            with contextlib.suppress(BadInput):
                value = parse_json(body)
                if _is_meant(value, names):
                    body = value
    if isinstance(body, dict) and INPUTS in body and not set(body) & set(names):
        if others := sorted(set(map(str, body)) - {INPUTS, PARAMETERS}):
            raise BadInput(f'{others[0]} is unknown beside "{INPUTS}"; leave it out')
        if given := body.get(PARAMETERS):
            shown = ", ".join(map(str, given)) if isinstance(given, dict) else given
            raise BadInput(
                f"{PARAMETERS} are {shown}; expected none: handler in model-config.yaml sets what "
                "this model does"
            )
        return body[INPUTS]
    return body


def _is_meant(value: Any, names: Collection[str]) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str | dict) for each in value)
    return isinstance(value, str) or bool({INPUTS, *names} & set(value))
