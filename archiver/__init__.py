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
        "api": ("Verification", "archive", "verify"),
        "errors": ("ArchiveError",),
        "manifest": ("Manifest",),
        "read": ("Archive", "open_archive"),
        "write": ("write_archive",),
    }

    def __getattr__(name: str) -> object:
        """Import what is used only: a command's help needs none of it."""
        for module, names in _LAZY.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Archive", "ArchiveError", "Manifest", "Verification", "archive", "open_archive"]
__all__ += ["verify", "write_archive"]
