"""Archives: an artifact, its handler and extra files in one sealed file, and back.

Needs the standard library only.
"""

from archiver.errors import ArchiveError
from archiver.manifest import Manifest
from archiver.read import Archive, open_archive
from archiver.write import write_archive

__all__ = ["Archive", "ArchiveError", "Manifest", "open_archive", "write_archive"]
