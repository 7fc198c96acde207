"""The archiver's errors.

ArchiveError
├── BadName          a model name or version breaks the one rule for names
├── CannotArchive    the given files cannot become an archive
│   └── WrongUsage   what was given means nothing together, whatever the files hold
├── ArchiveExists    the archive is there already and may not be replaced
├── ArchiveNotFound  there is no archive at the given path
├── BadManifest      MAR-INF/MANIFEST.json cannot be read as a manifest
├── RefusedArchive   the archive is damaged, was changed, or is unsafe to unpack
├── NotTrusted       the archive is not signed by a key that is trusted, or a key cannot be used
├── NotProven        nobody has proven the archive on the versions that are here
├── DoesNotRun       a worker could not load the archive; the message is the worker's own
└── Differs          the archive does not answer here as it did where it was made
"""

from collections.abc import Sequence

SHOWN_PROBLEMS = 20


class ArchiveError(Exception):
    """Base of the package's errors: a summary, and every problem that was found.

    Attributes:
        problems: one sentence each, never empty; the message shows the first 20.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems) or (summary,)
        super().__init__(_message(summary, problems))


class BadName(ArchiveError):
    """Raise when a model name or version breaks the rule of `archiver/untrusted/names.py`."""


class CannotArchive(ArchiveError):
    """Raise when the files given to `write_archive` cannot become an archive."""


class WrongUsage(CannotArchive):
    """Raise when something is missing, or does not go with something else that was given."""


class ArchiveExists(ArchiveError):
    """Raise when the archive exists and replacing it was not allowed."""


class ArchiveNotFound(ArchiveError):
    """Raise when there is no file at the path of an archive."""


class BadManifest(ArchiveError):
    """Raise when a manifest is not JSON or has fields of the wrong type."""


class RefusedArchive(ArchiveError):
    """Raise when an archive is damaged, was changed, or is unsafe to unpack."""


class NotTrusted(ArchiveError):
    """Raise when an archive is not signed by a trusted key, or a key file cannot be used."""


class NotProven(ArchiveError):
    """Raise when only proven archives are served, and this one was not, or on other versions."""


class DoesNotRun(ArchiveError):
    """Raise when an archive cannot be loaded the way a worker loads it."""


class Differs(ArchiveError):
    """Raise when golden requests or parity give something else than the archive states."""


class NothingCompared(ArchiveError):
    """Raise when an archive holds nothing that its answers could be compared with."""


def _message(summary: str, problems: Sequence[str]) -> str:
    if not problems:
        return summary
    if len(problems) == 1:
        return f"{summary}: {problems[0]}"
    lines = [f"{summary}: {len(problems)} problems"]
    lines += [f"  - {problem}" for problem in problems[:SHOWN_PROBLEMS]]
    hidden = len(problems) - SHOWN_PROBLEMS
    if hidden > 0:
        lines.append(f"  … and {hidden} more")
    return "\n".join(lines)
