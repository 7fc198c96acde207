"""Let torchvision and torchaudio be imported where their operators do not load.

PyPI's builds of both need CUDA's libraries. What is written in Python, all their networks but the
detectors, runs without: torchaudio where its library is absent, torchvision where the two
operators that it describes to the tracer exist at least by name.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAMES = """

# Without its library: names for what `_meta_registrations.py` describes.
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def main() -> None:
    """Change the packages of this environment, once; those that it has."""
    with suppress(PackageNotFoundError):
        library = Path(str(distribution("torchaudio").locate_file("torchaudio/lib")))
        for path in library.glob("*.so"):
            path.unlink()
    with suppress(PackageNotFoundError):
        torchvision = Path(str(distribution("torchvision").locate_file("torchvision")))
        (torchvision / "_C.so").unlink(missing_ok=True)
        extension = torchvision / "extension.py"
        text = extension.read_text(encoding="utf-8")
        if NAMES not in text:
            extension.write_text(text + NAMES, encoding="utf-8")


if __name__ == "__main__":
    main()
