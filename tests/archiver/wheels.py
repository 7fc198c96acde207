"""Wheels built by code, so that no test of requirements needs an index."""

import base64
import hashlib
import zipfile
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(
    folder: Path, name: str, version: str = "1.0", code: str = "", requires: str = ""
) -> Path:
    """Write a wheel of one module, named like the package."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    files = {f"{name}.py": code, f"{info}/METADATA": metadata, f"{info}/WHEEL": WHEEL}
    record = "".join(f"{file},{_digest(text)},{len(text)}\n" for file, text in files.items())
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as zipped:
        for file, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            zipped.writestr(zipfile.ZipInfo(file), text)
    return path


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
