"""Checkpoints that were made to do harm: each would make a marker file, or take all memory.

Every writer fills a folder and gives the path to read. The marker lies outside of that folder.
"""

import io
import json
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

Writer = Callable[[Path, Path], Path]


@dataclass(frozen=True)
class Hostile:
    """A writer, and what reading its file must say: an error, or the refused names."""

    write: Writer
    says: str
    is_refused: bool
    """Whether the whole file is refused; else its weights are read and nothing runs."""
    naive: str | None
    """How a careless reader would open it, to prove that it does harm."""


FILES: dict[str, Hostile] = {}


def hostile(
    name: str, says: str, *, is_refused: bool = True, naive: str | None = None
) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        assert name not in FILES
        FILES[name] = Hostile(writer, says, is_refused, naive)
        return writer

    return register


class Payload:
    """Runs a call when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def shell(marker: Path) -> Payload:
    import os

    return Payload(os.system, f"touch {marker}")


def evaluated(marker: Path) -> Payload:
    return Payload(eval, f"open({str(marker)!r}, 'w')")


def executed(marker: Path) -> Payload:
    return Payload(exec, f"open({str(marker)!r}, 'w')")


def weights() -> dict[str, torch.Tensor]:
    return nn.Linear(3, 2).state_dict()


# Payloads in every container.


@hostile("os.system beside weights, zip", "posix.system", naive="torch")
def _zip(folder: Path, marker: Path) -> Path:
    torch.save({**weights(), "evil": shell(marker)}, folder / "a.pt")
    return folder / "a.pt"


@hostile("os.system beside weights, legacy", "posix.system", naive="torch")
def _legacy(folder: Path, marker: Path) -> Path:
    content = {**weights(), "evil": shell(marker)}
    torch.save(content, folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


@hostile("eval in the optimizer's state", "builtins.eval", is_refused=False, naive="torch")
def _optimizer(folder: Path, marker: Path) -> Path:
    content = {"model": weights(), "optimizer": {"state": evaluated(marker), "param_groups": []}}
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


@hostile("exec, protocol 4", "builtins.exec", is_refused=False, naive="torch")
def _protocol_4(folder: Path, marker: Path) -> Path:
    torch.save({"model": weights(), "x": executed(marker)}, folder / "a.pt", pickle_protocol=4)
    return folder / "a.pt"


@hostile("the whole file is one call", "posix.system", naive="torch")
def _root(folder: Path, marker: Path) -> Path:
    torch.save(shell(marker), folder / "a.pt")
    return folder / "a.pt"


@hostile(
    "a call among Lightning's hyper-parameters", "posix.system", is_refused=False, naive="torch"
)
def _lightning(folder: Path, marker: Path) -> Path:
    content = {
        "state_dict": weights(),
        "pytorch-lightning_version": "2.6.6",
        "hparams_name": "kwargs",
        "hyper_parameters": {"_instantiator": "os.system", "width": shell(marker)},
    }
    torch.save(content, folder / "a.ckpt")
    return folder / "a.ckpt"


class Trap(nn.Module):
    """A module with a call among its attributes."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.trap = shell(marker)


@hostile("a pickled module with a call inside", "posix.system", is_refused=False, naive="torch")
def _module(folder: Path, marker: Path) -> Path:
    torch.save(Trap(marker), folder / "a.pt")
    return folder / "a.pt"


@hostile("a module of stock layers with a hook", "builtins.eval", is_refused=False, naive="torch")
def _stock_hook(folder: Path, marker: Path) -> Path:
    module: Any = nn.Linear(3, 2)
    module._forward_hooks = OrderedDict({0: evaluated(marker)})
    torch.save(module, folder / "a.pt")
    return folder / "a.pt"


@hostile("a pickle inside the pickle", "torch.storage._load_from_bytes", is_refused=False)
def _nested(folder: Path, marker: Path) -> Path:
    inner = io.BytesIO()
    torch.save(shell(marker), inner)
    trap = Payload(torch.storage._load_from_bytes, inner.getvalue())
    torch.save({"model": weights(), "x": trap}, folder / "a.pt")
    return folder / "a.pt"


@hostile("numpy.load of another file", "numpy", is_refused=False)
def _numpy(folder: Path, marker: Path) -> Path:
    trap = Payload(np.load, str(folder / "b.npy"), None, True)
    (folder / "b.npy").write_bytes(pickle.dumps(shell(marker)))
    torch.save({"model": weights(), "x": trap}, folder / "a.pt")
    return folder / "a.pt"


@hostile("an array of objects", "posix.system", is_refused=False, naive="torch")
def _object_array(folder: Path, marker: Path) -> Path:
    array = np.empty(1, dtype=object)
    array[0] = shell(marker)
    torch.save({"model": weights(), "best_acc": array}, folder / "a.pt")
    return folder / "a.pt"


def _rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Copy a zip of torch with other content under the same names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def _with_pickle(folder: Path, content: bytes) -> Path:
    """Write a torch zip whose pickle is these bytes."""
    torch.save({"weight": torch.zeros(3)}, folder / "honest.pt")
    return _rewritten(
        folder / "honest.pt",
        folder / "a.pt",
        lambda name, old: content if name.endswith("data.pkl") else old,
    )


@hostile("names of Python 2", "builtins.eval", is_refused=True, naive="torch")
def _python_2(folder: Path, marker: Path) -> Path:
    text = f"open({str(marker)!r}, 'w')".encode()
    body = b"\x80\x02c__builtin__\neval\nX" + struct.pack("<I", len(text)) + text + b"\x85R."
    return _with_pickle(folder, body)


@hostile("calls of protocol 0", "posix.system", naive="torch")
def _protocol_0(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"(S'touch " + str(marker).encode() + b"'\niposix\nsystem\n.")


@hostile("attributes for a tensor", "attributes for a Tensor")
def _build_on_tensor(folder: Path, marker: Path) -> Path:
    def change(name: str, content: bytes) -> bytes:
        # Behind the tensor's own call: BUILD with {"__class__": …}.
        evil = b"R}X\x09\x00\x00\x00__class__cbuiltins\neval\nsb"
        return (
            content[::-1].replace(b"R"[::-1], evil[::-1], 1)[::-1]
            if "data.pkl" in name
            else content
        )

    torch.save({"weight": torch.zeros(3)}, folder / "honest.pt")
    return _rewritten(folder / "honest.pt", folder / "a.pt", change)


# Distributed checkpoints, folders, archives.


def _save_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save_distributed({"model": weights(), "step": 3}, checkpoint_id=folder)


@contextmanager
def _changed_index(folder: Path) -> Iterator[Any]:
    """Yield the index of an honest checkpoint, and write it again with what was changed in it."""
    _save_dcp(folder)
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())  # harmless: it has just been written
    yield index
    file.write_bytes(pickle.dumps(index, 4))


@hostile("a DCP index that calls", "posix.system", naive="pickle .metadata")
def _dcp_index(folder: Path, marker: Path) -> Path:
    _save_dcp(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(shell(marker), 4))
    return folder


@hostile("a DCP index with a call beside the real one", "posix.system", naive="pickle .metadata")
def _dcp_index_inside(folder: Path, marker: Path) -> Path:
    with _changed_index(folder) as index:
        index.planner_data["evil"] = shell(marker)
    return folder


@hostile("a DCP index that gets an attribute", "a call of getattr", naive="pickle .metadata")
def _dcp_getattr(folder: Path, marker: Path) -> Path:
    with _changed_index(folder) as index:
        # A bound method is written as getattr(PosixPath(…), "touch").
        index.planner_data["evil"] = Payload(marker.touch)
    return folder


@hostile("a DCP byte item that calls", "posix.system", is_refused=False, naive="dcp")
def _dcp_item(folder: Path, marker: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save_distributed({"model": weights(), "step": shell(marker)}, checkpoint_id=folder)
    return folder


@hostile("a DCP slice outside of the folder", "not a plain file name")
def _dcp_path(folder: Path, marker: Path) -> Path:
    with _changed_index(folder) as index:
        for info in index.storage_data.values():
            info.relative_path = "../../etc/passwd"
    return folder


@hostile("a DCP slice beyond its file", "ends at")
def _dcp_range(folder: Path, marker: Path) -> Path:
    with _changed_index(folder) as index:
        for info in index.storage_data.values():
            info.length = 1 << 40
    return folder


@hostile("a DCP tensor of endless size", "more elements than its files have")
def _dcp_huge(folder: Path, marker: Path) -> Path:
    with _changed_index(folder) as index:
        for entry in index.state_dict_metadata.values():
            if hasattr(entry, "size"):
                entry.size = torch.Size([1 << 40])
                entry.chunks[0].sizes = torch.Size([1 << 40])
                entry.chunks[0].offsets = torch.Size([0] * len(entry.chunks[0].offsets))
    return folder


@hostile("a Hugging Face .bin that calls", "posix.system", naive="torch pytorch_model.bin")
def _bin(folder: Path, marker: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}', encoding="utf-8")
    torch.save({**weights(), "evil": shell(marker)}, folder / "pytorch_model.bin")
    return folder


@hostile("a shard outside of the folder", "not a plain file name")
def _shard(folder: Path, marker: Path) -> Path:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@hostile("training_args.bin and trial_state.pkl beside weights", "", is_refused=False)
def _neighbours(folder: Path, marker: Path) -> Path:
    (folder / "load_data.json").write_text('{"trial_type": "PyTorchTrial"}', encoding="utf-8")
    content = {"models_state_dict": [weights()], "callbacks": {}}
    torch.save(content, folder / "state_dict.pth")
    (folder / "trial_state.pkl").write_bytes(pickle.dumps(shell(marker)))
    torch.save(shell(marker), folder / "training_args.bin")
    (folder / "code").mkdir()
    source = f"open({str(marker)!r}, 'w')\n"
    (folder / "code" / "__init__.py").write_text(source, encoding="utf-8")
    return folder


MANIFEST = "MAR-INF/MANIFEST.json"


def _manifest(serialized: str) -> str:
    return json.dumps(
        {"runtime": "python", "model": {"modelName": "a", "serializedFile": serialized}}
    )


@hostile("a pickle that calls inside a .mar", "posix.system")
def _mar(folder: Path, marker: Path) -> Path:
    inner = io.BytesIO()
    torch.save({**weights(), "evil": shell(marker)}, inner)
    with zipfile.ZipFile(folder / "a.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.pt", inner.getvalue())
        archive.writestr(MANIFEST, _manifest("a.pt"))
    return folder / "a.mar"


@hostile("a .mar that grows without end", "a ratio over 200")
def _mar_bomb(folder: Path, marker: Path) -> Path:
    with zipfile.ZipFile(folder / "a.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.pt", bytes(64 << 20))
        archive.writestr(MANIFEST, _manifest("a.pt"))
    return folder / "a.mar"


@hostile("a tar with a link out of it", "it is a symbolic link")
def _tar_link(folder: Path, marker: Path) -> Path:
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        content = _manifest("a.pt").encode()
        described = tarfile.TarInfo(f"a/{MANIFEST}")
        described.size = len(content)
        archive.addfile(described, io.BytesIO(content))
        link = tarfile.TarInfo("a/a.pt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return folder / "a.tar.gz"


@hostile("a .mar whose weights are at ..", 'the path holds the part ".."')
def _mar_escape(folder: Path, marker: Path) -> Path:
    with zipfile.ZipFile(folder / "a.mar", "w") as archive:
        archive.writestr("../a.pt", b"x")
        archive.writestr(MANIFEST, _manifest("../a.pt"))
    return folder / "a.mar"


# Exported programs and TorchScript.


def _program(folder: Path) -> Path:
    program = torch.export.export(nn.Linear(3, 2).eval(), (torch.zeros(2, 3),))
    torch.export.save(program, folder / "honest.pt2")
    return folder / "honest.pt2"


@hostile("sample inputs of a pt2 that call", "the sample inputs are not plain", naive="pt2")
def _sample_inputs(folder: Path, marker: Path) -> Path:
    inner = io.BytesIO()
    torch.save(shell(marker), inner)

    def change(name: str, content: bytes) -> bytes:
        return inner.getvalue() if "/sample_inputs/" in name else content

    return _rewritten(_program(folder), folder / "a.pt2", change)


@hostile("a pickled weight of a pt2", "stored as a pickle", naive="pt2")
def _pickled_weight(folder: Path, marker: Path) -> Path:
    inner = io.BytesIO()
    torch.save(shell(marker), inner)

    def change(name: str, content: bytes) -> bytes:
        if name.endswith("_weights_config.json"):
            return content.replace(b'"use_pickle": false', b'"use_pickle": true')
        return inner.getvalue() if "/weights/weight_" in name else content

    return _rewritten(_program(folder), folder / "a.pt2", change)


@hostile("a pt2 whose weight leaves its bytes", "bytes into a payload of")
def _program_range(folder: Path, marker: Path) -> Path:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("_weights_config.json"):
            return content
        config = json.loads(content)
        config["config"]["weight"]["tensor_meta"]["storage_offset"]["as_int"] = 1 << 20
        return json.dumps(config).encode()

    return _rewritten(_program(folder), folder / "a.pt2", change)


@hostile("a call in a TorchScript pickle", "no TorchScript module")
def _script(folder: Path, marker: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
        jit: Any = torch.jit
        jit.script(nn.Linear(3, 2)).save(str(folder / "honest.pt"))

    def change(name: str, content: bytes) -> bytes:
        return pickle.dumps([shell(marker)], 2) if name.endswith("data.pkl") else content

    return _rewritten(folder / "honest.pt", folder / "a.pt", change)


# Damage and endless sizes.


def _safetensors(folder: Path, header: str, payload: bytes = bytes(16)) -> Path:
    raw = header.encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + payload)
    return folder / "a.safetensors"


@hostile("safetensors beyond the file", "not fully covered")
def _offsets(folder: Path, marker: Path) -> Path:
    return _safetensors(
        folder, '{"a": {"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]}}'
    )


@hostile("safetensors that overlap", "invalid offset for tensor")
def _overlap(folder: Path, marker: Path) -> Path:
    one = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    return _safetensors(folder, f'{{"a": {one}, "b": {one}}}')


@hostile("safetensors with a name twice", "is given twice")
def _twice(folder: Path, marker: Path) -> Path:
    one = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
    return _safetensors(folder, f'{{"a": {one}, "a": {one}}}')


@hostile("safetensors of another size than its shape", "overflow computing buffer size")
def _overflow(folder: Path, marker: Path) -> Path:
    shape = [1 << 32, 1 << 32]
    return _safetensors(
        folder, f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 16]}}}}'
    )


@hostile("safetensors with a deep header", "nested deeper than")
def _deep(folder: Path, marker: Path) -> Path:
    return _safetensors(folder, '{"a": ' + "[" * 1_000_000 + "}")


@hostile("safetensors with a header over the limit", "at most 16777216 are read")
def _long(folder: Path, marker: Path) -> Path:
    return _safetensors(folder, "{" + " " * (16 << 20) + "}")


@hostile("safetensors with an endless header", "not a checkpoint that can be read")
def _header(folder: Path, marker: Path) -> Path:
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b'{"a": 1}' + bytes(64))
    return folder / "a.safetensors"


@hostile("a compressed data.pkl", "is compressed")
def _deflated(folder: Path, marker: Path) -> Path:
    torch.save(weights(), folder / "honest.pt")
    with (
        zipfile.ZipFile(folder / "honest.pt") as old,
        zipfile.ZipFile(folder / "a.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return folder / "a.pt"


@hostile("a storage that grows without end", "it is compressed")
def _bomb(folder: Path, marker: Path) -> Path:
    with zipfile.ZipFile(folder / "a.pt", "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("a/data.pkl", pickle.dumps({}))
        new.writestr("a/data/0", bytes(64 << 20))
    return folder / "a.pt"


@hostile("an entry at ..", "leaves the file's own folder")
def _escape(folder: Path, marker: Path) -> Path:
    torch.save(weights(), folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt", "a") as archive:
        archive.writestr("archive/../../evil", b"x")
    return folder / "a.pt"


@hostile("two entries of one name", "is there twice")
def _same_name(folder: Path, marker: Path) -> Path:
    torch.save(weights(), folder / "a.pt")
    with zipfile.ZipFile(folder / "a.pt", "a") as archive, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate name", UserWarning)
        archive.writestr("a/data.pkl", pickle.dumps(shell(marker)))
    return folder / "a.pt"


@hostile("bytes behind the zip's end", "after its end-of-directory record")
def _behind(folder: Path, marker: Path) -> Path:
    torch.save(weights(), folder / "a.pt")
    with (folder / "a.pt").open("ab") as file:
        file.write(bytes(40))
    return folder / "a.pt"


def _tensor_pickle(numel: int, size: int, offset: int = 0, stride: int = 1) -> bytes:
    """Pickle one tensor on storage 0 with sizes of its own."""

    class Stored(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.identifier if isinstance(value, Identifier) else None

    stream = io.BytesIO()
    identifier = Identifier(("storage", torch.FloatStorage, "0", "cpu", numel))
    made = Payload(
        torch._utils._rebuild_tensor_v2,
        identifier,
        offset,
        (size,),
        (stride,),
        False,
        OrderedDict(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        Stored(stream, 2).dump({"weight": made})
    return stream.getvalue()


@dataclass(frozen=True)
class Identifier:
    """Stands for a storage in a pickle."""

    identifier: tuple[Any, ...]


@hostile("a storage of 2^40 elements", "storage '0' of 1099511627776")
def _numel(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, _tensor_pickle(1 << 40, 3))


@hostile("a tensor beyond its storage", "a tensor of shape [1099511627776]")
def _beyond(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, _tensor_pickle(3, 1 << 40))


@hostile("a tensor that starts beyond its storage", "that needs 1048579 elements")
def _offset(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, _tensor_pickle(3, 3, offset=1 << 20))


@hostile("a negative stride", "where a count belongs")
def _stride(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, _tensor_pickle(3, 3, offset=2, stride=-1))


@hostile("an endless storage in the legacy format", "more than the file has")
def _legacy_numel(folder: Path, marker: Path) -> Path:
    torch.save({"w": torch.zeros(3)}, folder / "a.pt", _use_new_zipfile_serialization=False)
    content = (folder / "a.pt").read_bytes()
    at = content.index(b"cpu") + 3
    # Behind the location: BINPUT and the number of elements, then None for the view.
    place = content.index(b"K\x03N", at)
    changed = content[:place] + b"\x8a\x05" + (1 << 38).to_bytes(5, "little") + content[place + 2 :]
    (folder / "a.pt").write_bytes(changed)
    return folder / "a.pt"


@hostile("a bytearray of 10^12 bytes", "builtins.bytearray", is_refused=True)
def _bytearray(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x10\xa5\xd4\xe8\x85R.")


@hostile("a torch.Tensor of 10^12 numbers", "torch.Tensor", is_refused=True)
def _allocates(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"\x80\x02ctorch\nTensor\n\x8a\x05\x00\x10\xa5\xd4\xe8\x85R.")


@hostile("a numpy array of 10^12 numbers", "numpy", is_refused=True)
def _array(folder: Path, marker: Path) -> Path:
    body = b"\x80\x02cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    return _with_pickle(folder, body + b"\x8a\x05\x00\x10\xa5\xd4\xe8\x85C\x01b\x87R.")


@hostile("a key that is a deep tuple", "deeply nested tuples")
def _deep_key(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.")


@hostile("a list in itself, doubled forty times", "holds a list")
def _laughs(folder: Path, marker: Path) -> Path:
    body = b"\x80\x02]q\x00" + b"".join(b"(h%ch%cl\x71%c" % (n, n, n + 1) for n in range(40))
    return _with_pickle(folder, body + b"0" * 40 + b".")


@hostile("hyper-parameters doubled forty times", "", is_refused=False)
def _laughing_hyper_parameters(folder: Path, marker: Path) -> Path:
    value: Any = ["x"]
    for _ in range(40):
        value = [value, value]
    content = {"model": weights(), "hyper_parameters": {"width": value}}
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


@hostile("a module that holds itself twice", "or itself")
def _module_in_itself(folder: Path, marker: Path) -> Path:
    module = nn.Module()
    module._modules["left"] = module._modules["right"] = module
    torch.save(module, folder / "a.pt")
    return folder / "a.pt"


@hostile("dicts that hold each other a thousand times", "or itself")
def _dict_in_itself(folder: Path, marker: Path) -> Path:
    content: Any = 1
    for _ in range(5):
        content = {f"part{number}": content for number in range(1000)}
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


@hostile("a memo that was never set", "never set")
def _memo(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"\x80\x02h\x07.")


@hostile("two values left at the end", "does not end with one value")
def _two_values(folder: Path, marker: Path) -> Path:
    return _with_pickle(folder, b"\x80\x02}}.")


@hostile("a sparse tensor whose indices leave it", "sparse tensor that is wrong")
def _sparse(folder: Path, marker: Path) -> Path:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 99]]), torch.ones(2), (100,), check_invariants=True
    )
    torch.save({"w": sparse}, folder / "honest.pt")

    def change(name: str, content: bytes) -> bytes:
        wrong = (99).to_bytes(8, "little")
        return content.replace(wrong, (1 << 40).to_bytes(8, "little"))

    return _rewritten(folder / "honest.pt", folder / "a.pt", change)


@hostile("a bare pickle", "bare pickle", naive="pickle a.pt")
def _bare(folder: Path, marker: Path) -> Path:
    (folder / "a.pt").write_bytes(pickle.dumps(shell(marker)))
    return folder / "a.pt"
