"""Every reader of bytes that others wrote: what it is given, what it may refuse them with.

A plug-in has its own in `plugins/<name>/tests/fuzzed.py`, a tuple `READERS`. What a reader raises
beside its refusals is a finding; so is a second reading that says something else.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import shutil
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.manifest import parse_manifest
from modelyard.archiver.report import parse_report
from modelyard.archiver.signature import parse_inputs, parse_signature
from modelyard.archiver.signing import parse_bundle, parse_statement, read_trusted_keys
from modelyard.archiver.untrusted.container import Held
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.exporter.errors import ExportError
from modelyard.exporter.ingest import parse_checkpoint
from modelyard.handlers.body import read_instances, weights_of
from modelyard.handlers.errors import HandlerError
from modelyard.handlers.judge.check import check
from modelyard.handlers.tensors import read_request
from modelyard.serve import errors
from modelyard.serve.api.oip import asks_for_ready, refuse_overrides
from modelyard.serve.control.saved import read_models
from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.form import read_parts
from modelyard.serve.dataplane.tracing import read_parent

CORPORA = Path(__file__).with_name("corpus")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Reader:
    """One reader."""

    name: str
    read: Callable[[bytes], object]
    """Reads bytes, and checks what it makes of them where there is something to check."""
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]]
    """Whole inputs, from which others are made."""
    corpora: Path = CORPORA
    """Folder of the folder of inputs that led somewhere else than all before; plug-ins have own."""

    @property
    def corpus(self) -> Path:
        """Folder of what is kept of earlier runs."""
        return self.corpora / self.name.replace(" ", "-").replace("'", "")

    def known(self) -> list[bytes]:
        """Return the seeds, those with something else in one place, and what is kept of runs."""
        kept = sorted(self.corpus.iterdir()) if self.corpus.is_dir() else []
        seeds = self.seeds()
        others = (each for seed in seeds for each in with_another_value(seed))
        return [*seeds, *others, *(each.read_bytes() for each in kept)]


OTHERS: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "../x", [], {}, [None], {"x": None}, [[]],
)  # fmt: skip


def with_another_value(data: bytes) -> Iterator[bytes]:
    """Yield JSON with each of its values in turn replaced by each of `OTHERS`, or left out."""
    try:
        document = json.loads(data)
    except ValueError:
        return
    for place in _places(document):
        for other in OTHERS:
            yield json.dumps(_put(document, place, other)).encode()
        if place and isinstance(place[-1], str):
            yield json.dumps(_put(document, place, ...)).encode()


def _places(value: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield here
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield from _places(each, (*here, key))


def _put(value: Any, place: tuple[str | int, ...], other: Any) -> Any:
    """Return a copy with another value at a place; `...` leaves the key out."""
    if not place:
        return other
    key, *rest = place
    if isinstance(value, list):
        return [_put(v, tuple(rest), other) if i == key else v for i, v in enumerate(value)]
    changed = {k: _put(v, tuple(rest), other) if k == key else v for k, v in value.items()}
    if not rest and other is ...:
        del changed[key]
    return changed


def all_readers() -> dict[str, Reader]:
    """Return the readers of the core and of the plug-ins that this checkout has, by name."""
    found = list(READERS)
    for file in sorted(ROOT.glob("plugins/*/tests/fuzzed.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found += importlib.import_module(module).READERS
    return {each.name: each for each in found}


@cache
def _scratch() -> Path:
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="modelyard-fuzz-", dir=memory if memory.exists() else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def of_file(read: Callable[[Path], Any], name: str = "input") -> Callable[[bytes], object]:
    """Return a reader of bytes for one of files."""

    def reader(data: bytes) -> object:
        file = _scratch() / name
        file.write_bytes(data)
        return read(file)

    return reader


def texts(*given: str) -> Callable[[], Sequence[bytes]]:
    """Return seeds."""
    return lambda: [each.encode() for each in given]


# -- archives, and what lies in them ---------------------------------------------------------------

SIGNATURE = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3], "range": [0, 1]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
    "dims": {"batch": {"min": 1, "max": 8}},
}
MANIFEST: dict[str, Any] = {
    "createdOn": "2026-11-26T00:00:00Z",
    "runtime": "python",
    "archiverVersion": "0.1",
    "model": {
        "modelName": "m",
        "handler": "h.py",
        "modelVersion": "1.0",
        "serializedFile": "m.pt2",
        "configFile": "c.yaml",
    },
    "modelyard": {
        "schema": 1,
        "digests": dict.fromkeys(("h.py", "m.pt2", "c.yaml", "a.json", "b.json"), "0" * 64),
        "signature": SIGNATURE,
        "golden": [
            {
                "request": "a.json",
                "expected": "b.json",
                "content_type": "application/json",
                "tolerance": 1e-3,
            }
        ],
        "requirements": [],
    },
}

UNSEALED = {name: value for name, value in MANIFEST.items() if name != "modelyard"}
"""As other archivers write it."""


def _open(file: Path) -> None:
    with open_archive(file) as archive:
        target = _scratch() / "unpacked"
        archive.unpack(target)
        try:
            names = {str(each.relative_to(target)) for each in target.rglob("*") if each.is_file()}
            assert names == set(archive.names), "what is unpacked is not what it names"
        finally:
            shutil.rmtree(target)


def _archives() -> list[bytes]:
    files = _scratch() / "to-pack"
    files.mkdir(exist_ok=True)
    (files / "h.py").write_text("x = 1")
    (files / "w.bin").write_bytes(b"weights")
    packed = [
        write_archive(
            "m", version="1.0", artifact=files / "w.bin", handler=f"{files}/h.py", dry_run=False,
            output_dir=files, force=True,
        ).read_bytes()
    ]  # fmt: skip
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as zipped:
            zipped.writestr(MANIFEST_NAME, json.dumps(UNSEALED))
            zipped.writestr("h.py", "x = 1")
        packed.append(file.getvalue())
    return packed


def _tars() -> list[bytes]:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, text in {
            f"m/{MANIFEST_NAME}": json.dumps(UNSEALED),
            "m/h.py": "x = 1",
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return [file.getvalue()]


def _json_twice(data: bytes) -> None:
    value = parse_json(data)
    assert parse_json(json.dumps(value)) == value, "another value when written and read again"


REPORT = {
    "format": "pt2",
    "artifact_sha256": "0" * 64,
    "signature": SIGNATURE,
    "details": {"labels": {"0": "a"}, "probabilities": {"y": True}, "trusted_operators": ["a.b"]},
    "checkpoint": {"sha256": "0" * 64, "path": "c.pt"},
    "versions": {"torch": "2.13.0"},
    "parity": {
        "cases": 20,
        "kinds": ["normal"],
        "outputs": {"y": {"tolerance": 1e-4, "scaled": 1e-6, "error": 1e-6, "verdict": "agrees"}},
        "integers": {},
        "plan": {"left_out": []},
    },
}
BUNDLE = {
    "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
    "verificationMaterial": {"publicKey": {"hint": "ab" * 32}},
    "dsseEnvelope": {
        "payloadType": "application/vnd.in-toto+json",
        "payload": "e30=",
        "signatures": [{"sig": "AAAA", "keyid": ""}],
    },
}
STATEMENT = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "m", "digest": {"sha256": "0" * 64}}],
    "predicateType": "https://model_signing/signature/v1.0",
    "predicate": {"resources": [{"name": "a", "algorithm": "sha256", "digest": "0" * 64}]},
}

# -- requests --------------------------------------------------------------------------------------

INFER = (
    b'{"id":"1","inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]},'
    b'{"name":"t","datatype":"BYTES","shape":[1],"data":["a"]}],"outputs":[{"name":"y"}]}'
)
BINARY = (
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}},'
    b'{"name":"s","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":7}}]}'
)
MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="data"; filename="a.png"\r\n'
    b"Content-Type: image/png\r\n\r\nabc\r\n--b\r\nContent-Disposition: form-data; name=x\r\n\r\n"
    b"1\r\n--b--\r\n"
)


def _infer(data: bytes) -> None:
    """The first byte chooses the header; the rest is the body."""
    how, body = data[:1], data[1:]
    if how < b"A":
        read_request(body)
    elif how < b"a":
        read_request(body, str(max(body.rfind(b"}") + 1, 0)), most_bytes=1 << 20)
    else:
        read_request(body, None, "gzip" if how < b"n" else "deflate", most_bytes=1 << 20)


def _infer_seeds() -> list[bytes]:
    import gzip
    import zlib

    return [
        b"1" + INFER,
        b"A" + BINARY + b"\0" * 8 + b"\3\0\0\0abc",
        b"a" + gzip.compress(INFER, mtime=0),
        b"z" + zlib.compress(INFER),
    ]


def _frames(data: bytes) -> None:
    """The first byte says in which pieces the rest arrives; the frames are the same whatever."""
    step, stream = (data[0] if data else 0) or 1, data[1:]
    whole = wire.Decoder(1 << 16, 1 << 12, 1 << 17)
    pieces = wire.Decoder(1 << 16, 1 << 12, 1 << 17)
    expected = _items(lambda: whole.feed(stream))
    found = _items(
        lambda: [
            frame
            for at in range(0, len(stream), step)
            for frame in pieces.feed(stream[at : at + step])
        ]
    )
    assert expected is None or found is None or expected == found, "pieces make other frames"
    if expected is None:
        raise wire.WireError("refused")


def _items(feed: Callable[[], list[list[wire.Item]]]) -> list[Any] | None:
    try:
        frames = feed()
        for frame in frames:
            for item in frame:
                if not item.id:
                    wire.decode_control(item)
                wire.unpack_meta(item.meta)
        return [[(i.id, i.code, bytes(i.meta), bytes(i.body)) for i in frame] for frame in frames]
    except wire.WireError:
        return None


def _frame_seeds() -> list[bytes]:
    frame = wire.Frame()
    frame.add(7, 1, 0, b"/a\0q=1\0id", [b"body"])
    frame.add(8, 1, 0, b"", [b""])
    items = b"".join(frame.buffers())
    return [b"\1" + items + items, b"\5" + wire.encode_control(wire.READY, {"pid": 1}) + items]


def _saved(data: bytes) -> None:
    state = StateDir(_scratch())
    state.models_file.write_bytes(data)
    state.previous_models_file.unlink(missing_ok=True)
    read_models(state, is_trial=True)


# -- checkpoints and artifacts ---------------------------------------------------------------------


def _torch_files() -> list[bytes]:
    import torch

    weights = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.ones(1, dtype=torch.int64)}
    made = []
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"state_dict": weights, "epoch": 1}, file, _use_new_zipfile_serialization=zipped)
        made.append(file.getvalue())
    return made


def _safetensors() -> list[bytes]:
    import safetensors.torch
    import torch

    return [safetensors.torch.save({"w": torch.arange(6.0).reshape(2, 3)}, {"format": "pt"})]


def _onnx() -> list[bytes]:
    from onnx import TensorProto, helper

    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 2]) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", sides[:1], sides[1:], [weight])
    return [helper.make_model(graph).SerializeToString()]


def _scripts() -> list[bytes]:
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and what people have
        traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, file)
    return [file.getvalue()]


def _programs() -> list[bytes]:
    import torch

    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), file)
    return [file.getvalue()]


_ARCHIVE, _EXPORT, _VALUE = (ArchiveError,), (ExportError,), (ValueError,)
READERS = (
    Reader("archive", of_file(_open, "m.mar"), _ARCHIVE, _archives),
    Reader("archive in a tar", of_file(_open, "m.tar.gz"), _ARCHIVE, _tars),
    Reader("manifest", parse_manifest, _ARCHIVE, texts(json.dumps(MANIFEST))),
    Reader(
        "report",
        lambda data: parse_report(data, Path("m.report.json")),
        _ARCHIVE,
        texts(json.dumps(REPORT)),
    ),
    Reader(
        "signature",
        lambda data: parse_signature(parse_json(data)),
        _VALUE,
        texts(json.dumps(SIGNATURE)),
    ),
    Reader(
        "inputs",
        lambda data: parse_inputs(data.decode("utf-8").split("\n")),
        _VALUE,
        texts("x:float32[batch=1..8,3]", "ids:int64[1,seq]=0..30521\nmask:bool[1,seq]"),
    ),
    Reader("json", _json_twice, _VALUE, texts('{"a": [1, -2.5e3, "\\u00e9", null, true]}', "[]")),
    Reader(
        "yaml", parse_yaml, _VALUE, texts("minWorkers: 1\nhandler:\n  top: [1, 2]\n", "a: &b 1")
    ),
    Reader(
        "bundle", lambda data: parse_bundle(parse_json(data)), _VALUE, texts(json.dumps(BUNDLE))
    ),
    Reader("statement", parse_statement, _VALUE, texts(json.dumps(STATEMENT))),
    Reader(
        "keys",
        of_file(read_trusted_keys, "keys.pem"),
        _ARCHIVE,
        texts(
            "# a remark\nname Ann\nexpires 2030-01-01\nlowest m 2.0\n-----BEGIN PUBLIC KEY-----\n"
            "MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
            "-----END PUBLIC KEY-----\n"
        ),
    ),
    Reader("tensors in JSON", read_request, (HandlerError,), lambda: [INFER]),
    Reader("tensors", _infer, (HandlerError,), _infer_seeds),
    Reader(
        "instances",
        read_instances,
        (HandlerError,),
        texts('{"instances": [{"b64": "YWJj"}, {"x": {"b64": "YQ=="}}, [1, 2]]}'),
    ),
    Reader(
        "form",
        lambda data: read_parts("multipart/form-data; boundary=b", data),
        _VALUE,
        lambda: [MULTIPART],
    ),
    Reader(
        "form's type",
        lambda data: read_parts(data.decode("latin-1"), MULTIPART),
        _VALUE,
        texts("multipart/form-data; boundary=b", 'multipart/form-data; charset=x; boundary="b"'),
    ),
    Reader("frames", _frames, (wire.WireError,), _frame_seeds),
    Reader("accept", lambda data: weights_of(data.decode("latin-1")), (), texts("a/b;q=0.5, */*")),
    Reader(
        "traceparent",
        lambda data: read_parent([(b"traceparent", data), (b"tracestate", data)]),
        (),
        texts("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ),
    Reader("repository index", asks_for_ready, (errors.ServeError,), texts('{"ready": true}')),
    Reader("repository load", refuse_overrides, (errors.ServeError,), texts('{"parameters": {}}')),
    Reader(
        "saved models",
        _saved,
        (),
        texts('{"schema": 1, "models": [{"file": "m.mar", "name": "m", "workers": 2}]}'),
    ),
    Reader("torch file", of_file(parse_checkpoint), _EXPORT, _torch_files),
    Reader("safetensors", of_file(parse_checkpoint), _EXPORT, _safetensors),
    Reader("onnx", of_file(parse_checkpoint), _EXPORT, _onnx),
    Reader("torchscript", of_file(parse_checkpoint), _EXPORT, _scripts),
    Reader("exported program", lambda data: check(Held(data)), (), _programs),
)
