"""Archives: an artifact, its handler and extra files in one sealed file, and back.

Needs the standard library only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.archiver.api import Verification, archive, verify
    from modelyard.archiver.errors import ArchiveError
    from modelyard.archiver.manifest import Manifest
    from modelyard.archiver.read import Archive, open_archive
    from modelyard.archiver.write import write_archive
else:
    _LAZY = {
        "Verification": "api",
        "archive": "api",
        "verify": "api",
        "Archive": "read",
        "ArchiveError": "errors",
        "Manifest": "manifest",
        "open_archive": "read",
        "write_archive": "write",
    }

    def __getattr__(name: str) -> object:
        """Import what is used only: a command's help needs none of it."""
        if name in _LAZY:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Archive",
    "ArchiveError",
    "Manifest",
    "Verification",
    "archive",
    "open_archive",
    "verify",
    "write_archive",
]
