import os
import resource
import shutil
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Signature, TensorSpec
from modelyard.exporter.formats.to_aoti import write as write_aoti
from modelyard.exporter.formats.to_torchscript import write as write_torchscript
from modelyard.handlers.models import sharing
from modelyard.handlers.models.backends import Artifact, open_artifact
from modelyard.handlers.models.sharing import SHARED_ONNX, make_once, map_weights
from tests.handlers.conftest import export_all
from tests.serve.live import poll

WIDTH = 512
WEIGHT_BYTES = WIDTH * WIDTH * 4
FILES = {"pt2": "wide.pt2", "torchscript": "wide.pt", "onnx": "wide.onnx"}
SIGNATURE = Signature(
    (TensorSpec("image", "float32", (2, WIDTH)),),
    (TensorSpec("logits", "float32", (2, WIDTH)),),
)

each_format = pytest.mark.parametrize("format", list(FILES))
each_torch_format = pytest.mark.parametrize("format", ["pt2", "torchscript"])


class Wide(nn.Module):
    """Two weights of 1 MB each, a buffer of 1 MB, and a table that two names share."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("scale", torch.rand(WIDTH, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        scaled = image @ self.scale
        out: Tensor = self.tied(torch.relu(self.second(torch.relu(self.first(scaled)))))
        return out


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    export_all(Wide().eval(), torch.rand(5, WIDTH), folder / "wide")
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A version's own folder."""
    return Path(shutil.copytree(exported, tmp_path / "version"))


def mapped(path: Path) -> dict[str, int]:
    """Return what this process maps of a file or of the files of a folder, in kB by kind."""
    found: dict[str, int] = {}
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_it = len(rest) > 4 and rest[4].startswith(str(path))
        elif is_it and rest[-1] == "kB":
            found[name.rstrip(":")] = found.get(name.rstrip(":"), 0) + int(rest[0])
    return found


@contextmanager
def largest_file(limit_bytes: int) -> Iterator[None]:
    """Let writes beyond a size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@each_format
def test_shared_weights_are_mapped_and_give_the_same_answers(folder: Path, format: str) -> None:
    file = folder / FILES[format]
    copied, shared = open_artifact(file, format), open_artifact(file, format, share=True)
    image = torch.rand(8, WIDTH)
    with torch.inference_mode():
        expected, found = copied(image), shared(image)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(found, expected)
    here = mapped(folder)
    assert here["Rss"] * 1024 >= 2.9 * WEIGHT_BYTES
    assert here["Anonymous"] == 0


@each_format
def test_weights_outlive_their_files(folder: Path, format: str) -> None:
    shared = open_artifact(folder / FILES[format], format, share=True)
    image = torch.rand(1, WIDTH)
    expected = open_artifact(folder / FILES[format], format)(image)
    shutil.rmtree(folder)
    assert torch.equal(torch.as_tensor(shared(image)), torch.as_tensor(expected))


@each_format
def test_nothing_is_mapped_or_written_unasked(folder: Path, format: str) -> None:
    before = sorted(folder.rglob("*"))
    artifact = open_artifact(folder / FILES[format], format)
    assert not mapped(folder)
    assert sorted(folder.rglob("*")) == before
    assert artifact.format == format


@each_torch_format
def test_writing_to_mapped_weights_reaches_neither_the_file_nor_others(
    folder: Path, format: str
) -> None:
    file = folder / FILES[format]
    content = file.read_bytes()
    edited, other = (open_artifact(file, format, share=True) for _ in range(2))
    image = torch.rand(2, WIDTH)
    before = other(image)
    assert edited.module is not None
    with torch.no_grad():
        for tensor in (*edited.module.parameters(), *edited.module.buffers()):
            tensor.zero_()
    assert isinstance(before, Tensor) and bool(before.any())
    assert not torch.as_tensor(edited(image)).any()
    assert torch.equal(torch.as_tensor(other(image)), before)
    assert file.read_bytes() == content


@each_torch_format
def test_mapped_weights_are_trained_as_copies_are(folder: Path, format: str) -> None:
    file, image = folder / FILES[format], torch.rand(2, WIDTH)

    def trained(share: bool) -> Tensor:
        module = open_artifact(file, format, share=share).module
        assert module is not None
        optimizer = torch.optim.SGD([each.requires_grad_() for each in module.parameters()], 1e-9)
        module(image).square().sum().backward()
        optimizer.step()
        return torch.as_tensor(module(image)).detach()

    assert torch.equal(trained(share=True), trained(share=False))
    assert not torch.equal(trained(share=True), torch.as_tensor(open_artifact(file, format)(image)))


def saved(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_tensors_of_one_storage_stay_of_one_storage(tmp_path: Path) -> None:
    base = torch.rand(WIDTH, WIDTH)
    loaded = torch.load(saved({"whole": base, "turned": base.T, "row": base[3]}, tmp_path))
    assert map_weights(loaded.values(), tmp_path / "weights.pt") == WEIGHT_BYTES
    loaded["whole"][3].fill_(7)
    assert torch.equal(loaded["row"], torch.full((WIDTH,), 7.0))
    assert torch.equal(loaded["turned"][:, 3], loaded["row"])
    assert torch.equal(loaded["whole"][4], base[4])


def test_tensors_of_one_content_do_not_become_one(tmp_path: Path) -> None:
    zeros = {name: torch.zeros(WIDTH, WIDTH) for name in ("one", "other")}
    loaded = torch.load(saved(zeros, tmp_path))
    assert map_weights(loaded.values(), tmp_path / "weights.pt") == 2 * WEIGHT_BYTES
    loaded["one"].fill_(1)
    assert not loaded["other"].any()


def shifted(path: Path) -> Path:
    """Write a zip again so that no entry begins at a multiple of 64."""
    target = path.with_name("shifted.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            kept = zipfile.ZipInfo(entry.filename)
            assert copy.fp is not None
            end = copy.fp.tell() + 30 + len(entry.filename)
            kept.extra = b"FB" + b"\0\0" if end % 64 != 60 else b"FB\1\0\0"
            copy.writestr(kept, source.read(entry))
    return target


def compressed(path: Path) -> Path:
    target = path.with_name("compressed.pt")
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy,
    ):
        for entry in source.infolist():
            copy.writestr(entry.filename, source.read(entry))
    return target


def other_values(path: Path) -> Path:
    return saved({"weight": torch.rand(WIDTH, WIDTH)}, path.parent)


def no_zip(path: Path) -> Path:
    target = path.with_name("weights.bin")
    target.write_bytes(os.urandom(2 * WEIGHT_BYTES))
    return target


def cut_short(path: Path) -> Path:
    target = path.with_name("short.pt")
    target.write_bytes(path.read_bytes()[:WEIGHT_BYTES])
    return target


@pytest.mark.parametrize("change", [shifted, compressed, other_values, no_zip, cut_short])
def test_what_cannot_be_mapped_stays_a_copy(tmp_path: Path, change: Callable[[Path], Path]) -> None:
    weight = torch.rand(WIDTH, WIDTH)
    file = saved({"weight": weight}, tmp_path)
    loaded = torch.load(file)["weight"]
    address = loaded.data_ptr()
    assert map_weights([loaded], change(file)) == 0
    assert loaded.data_ptr() == address
    assert torch.equal(loaded, weight)


def test_exported_torchscript_can_be_mapped(tmp_path: Path) -> None:
    net, image = Wide().eval(), torch.rand(2, WIDTH)
    write_torchscript(net, SIGNATURE, (image,), tmp_path / "wide.pt")
    with zipfile.ZipFile(tmp_path / "wide.pt") as written:
        assert written.testzip() is None
    shared = open_artifact(tmp_path / "wide.pt", "torchscript", share=True)
    assert torch.equal(torch.as_tensor(shared(image)), net(image))
    assert mapped(tmp_path)["Rss"] * 1024 >= 2.9 * WEIGHT_BYTES


def test_on_a_full_disk_onnx_keeps_copies(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = torch.rand(2, WIDTH)
    expected = open_artifact(folder / "wide.onnx", "onnx")(image)
    with largest_file(WEIGHT_BYTES):
        artifact = open_artifact(folder / "wide.onnx", "onnx", share=True)
    assert "each worker keeps a copy of the weights of wide.onnx" in caplog.text
    assert torch.equal(torch.as_tensor(artifact(image)), torch.as_tensor(expected))
    assert not mapped(folder)
    assert [each.name for each in (folder / ".shared").iterdir()] == ["wide.onnx.lock"]


def test_folder_is_made_once_by_workers_that_come_at_once(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.write_bytes(b"weights")
    made: list[Path] = []
    all_came = threading.Barrier(4)

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("made")

    def work() -> None:
        all_came.wait()
        folder = make_once(source, make)
        assert folder is not None
        assert (folder / "file").read_text() == "made"

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == 1


def test_worker_that_dies_while_it_makes_the_folder_leaves_it_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    dying = subprocess.Popen(
        [sys.executable, "-c", _DYING, str(tmp_path / "model")], cwd=Path(__file__).parents[2]
    )
    poll((tmp_path / "begun").exists, "the first worker begins")
    dying.kill()
    dying.wait()
    folder = make_once(tmp_path / "model", lambda folder: (folder / "file").touch())
    assert folder is not None
    assert (folder / "file").exists()


_DYING = """
import sys, time
from pathlib import Path
from modelyard.handlers.models.sharing import make_once
source = Path(sys.argv[1])
make_once(source, lambda folder: (source.with_name("begun").touch(), time.sleep(60)))
"""


@pytest.mark.slow
def test_native_code_computes_with_mapped_weights(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a compiler")
    net, image = Wide().eval(), torch.rand(2, WIDTH)
    program = torch.export.export(net, (image,))
    file = tmp_path / "wide.aoti.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_aoti(program, SIGNATURE, file)
    copied, shared = (open_artifact(file, "aoti", share=share) for share in (False, True))
    assert torch.equal(torch.as_tensor(shared(image)), torch.as_tensor(copied(image)))
    weights = mapped(tmp_path / ".shared" / file.name / "weights.pt")
    assert weights["Rss"] * 1024 >= 2.9 * WEIGHT_BYTES
    assert weights["Anonymous"] == 0


class Positions(nn.Module):
    """A table of odd size, int64 as position ids are, and weights that kernels reorder."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 64)
        self.places = nn.Embedding(515, 64)
        self.register_buffer("positions", torch.arange(515)[None])
        self.first = nn.Linear(64, 2000)
        self.second = nn.Linear(64, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.tokens(ids) + self.places(self.positions[:, : ids.shape[1]])
        out: Tensor = self.first(rows) + self.second(rows.relu())
        return out


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX model whose weights, laid one after the other, end onnxruntime's process."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("odd") / "odd.onnx"
    ids = torch.randint(0, 2000, (3, 7))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        torch.onnx.export(
            Positions().eval(),
            (ids,),
            file,
            dynamo=True,
            dynamic_shapes=({1: torch.export.Dim("length", max=514)},),
            external_data=False,
            verbose=False,
        )
    return file


IDS = torch.randint(0, 2000, (3, 11), generator=torch.Generator().manual_seed(1))


def gives_the_same(artifact: Artifact, file: Path) -> bool:
    found, expected = artifact(IDS), open_artifact(file, "onnx")(IDS)
    return torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def in_a_folder_of_its_own(file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(file, tmp_path / file.name))


def test_mapped_onnx_weights_lie_where_kernels_may_read_them(odd: Path, tmp_path: Path) -> None:
    file = in_a_folder_of_its_own(odd, tmp_path)
    artifact = open_artifact(file, "onnx", share=True)
    assert gives_the_same(artifact, odd)
    model = onnx.load(tmp_path / ".shared" / file.name / SHARED_ONNX, load_external_data=False)
    entries = [(each.key, each.value) for t in model.graph.initializer for each in t.external_data]
    offsets = [int(value) for key, value in entries if key == "offset"]
    reordered = [v.split("|")[1].split(";")[0] for k, v in entries if k.startswith("prepacked")]
    assert len(offsets) == 7
    assert len(reordered) == 2
    assert not any(int(offset) % 64 for offset in [*offsets, *reordered])


def test_weights_whose_trial_ends_the_process_stay_copies(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = sharing.SHARED_ONNX_SCRIPT.read_text()
    dying = script.replace(
        "    mapped = _start(", "    signal.raise_signal(signal.SIGSEGV)\n    mapped = _start("
    )
    assert dying != script
    (tmp_path / "dying.py").write_text(dying)
    monkeypatch.setattr(sharing, "SHARED_ONNX_SCRIPT", tmp_path / "dying.py")
    file = in_a_folder_of_its_own(odd, tmp_path)
    artifact = open_artifact(file, "onnx", share=True)
    assert (
        "copy of the weights of odd.onnx: the process that tried them mapped ended by SIGSEGV"
        in caplog.text
    )
    assert not mapped(tmp_path)
    assert gives_the_same(artifact, odd)


def test_weights_that_no_example_proves_stay_copies(
    odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = in_a_folder_of_its_own(odd, tmp_path)
    outside = [torch.zeros(3, 7)]  # no integers
    artifact = open_artifact(file, "onnx", share=lambda: [outside])
    assert (
        "each worker keeps a copy of the weights of odd.onnx: no input to try them" in caplog.text
    )
    assert not mapped(tmp_path)
    assert gives_the_same(artifact, odd)


def test_weights_that_give_other_values_stay_copies(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = sharing.SHARED_ONNX_SCRIPT.read_text()
    # As a file that is written short would be: zeros where the weights were.
    wrong = script.replace("target.write(source.read(length))", "target.write(bytes(length))")
    assert wrong != script
    (tmp_path / "wrong.py").write_text(wrong)
    monkeypatch.setattr(sharing, "SHARED_ONNX_SCRIPT", tmp_path / "wrong.py")
    file = in_a_folder_of_its_own(odd, tmp_path)
    artifact = open_artifact(file, "onnx", share=lambda: [[IDS]])
    assert "odd.onnx: it computes other values from them mapped" in caplog.text
    assert gives_the_same(artifact, odd)
