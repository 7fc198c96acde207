"""Archives: an artifact, its handler and extra files in one sealed file, and back.

Needs the standard library only.
"""

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.read import Archive, open_archive
from modelyard.archiver.write import write_archive

__all__ = ["Archive", "ArchiveError", "Manifest", "open_archive", "write_archive"]
