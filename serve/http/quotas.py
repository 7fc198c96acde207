"""How much a token may ask: requests a second and requests at once, over all models and servers.

The rate is the Generic Cell Rate Algorithm (ITU-T I.371): one number for each token, the time at
which the next request would come if all came evenly. Servers of one machine share it in a file,
which a lock of the kernel guards and nobody waits for longer than a request takes to be counted.
"""

import fcntl
import hashlib
import math
import mmap
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from modelyard.serve.errors import QuotaUsed
from modelyard.serve.front.begin import Release
from modelyard.serve.http.tokens import Grant, Grants, bearer_tokens, find_grant

BURST_S = 0.25
"""What a token has not used of its rate may be made up for within this time, so that over ten
seconds it gets 2.5 % too much at most, or one request."""
_DUE = struct.Struct("=d")
_AT_ONCE = struct.Struct("=I")
_SIZE = _DUE.size + 65 * _AT_ONCE.size
"""Size of a token's file: when its next request is due, and what it has in each server, the one
alone (0) or one of several (1 to 64)."""


class Quotas:
    """What the tokens of a machine have used of what they may.

    Args:
        grants: returns the tokens.
        folder: folder of the files, which servers share.
        number: number of this server among several; 0 where it is alone.
    """

    def __init__(self, grants: Grants, folder: Path, number: int = 0) -> None:
        self._grants = grants
        self._folder = folder
        self._at = _DUE.size + number * _AT_ONCE.size
        self._of: Sequence[Grant] = ()
        self._limited: list[Grant] = []
        self._used: dict[str, tuple[int, mmap.mmap]] = {}
        if number == 0:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            for file in folder.iterdir():  # of a server of this number that was killed
                _AT_ONCE.pack_into(self._open(file)[1], self._at, 0)

    def take(self, headers: Sequence[tuple[bytes, bytes]]) -> Release | None:
        """Count a request, and return what is called at its end; None where nothing limits it.

        Raises:
            QuotaUsed: its token has no more for now.
        """
        if (grants := self._grants()) is not self._of:
            self._of, self._limited = grants, [one for one in grants if one.rate or one.at_once]
        if not self._limited:
            return None
        for token in bearer_tokens(headers):
            if (grant := find_grant(self._limited, token)) is not None:
                return self._take(grant)
        return None

    def _take(self, grant: Grant) -> Release:
        used = self._used.get(grant.name)
        if used is None:
            name = hashlib.sha256(grant.name.encode()).hexdigest()
            used = self._used[grant.name] = self._open(self._folder / name)
        lock, counts = used
        fcntl.lockf(lock, fcntl.LOCK_EX)
        try:
            if grant.at_once:
                at_once = sum(struct.unpack_from("=65I", counts, _DUE.size))
                if at_once >= grant.at_once:
                    raise QuotaUsed(f"the token {grant.name} may have {grant.at_once} at once")
            if grant.rate:
                now, interval_s = monotonic(), 1 / grant.rate
                ahead_s = max(BURST_S - interval_s, interval_s)
                due = max(_DUE.unpack_from(counts)[0], now)
                if due > now + ahead_s:
                    raise QuotaUsed(
                        f"the token {grant.name} may send {grant.rate:g} a second",
                        math.ceil(due - now - ahead_s),
                    )
                _DUE.pack_into(counts, 0, due + interval_s)
            self._add(counts, 1)
        finally:
            fcntl.lockf(lock, fcntl.LOCK_UN)
        return lambda: self._add(counts, -1)  # which only this process writes

    def _add(self, counts: mmap.mmap, count: int) -> None:
        _AT_ONCE.pack_into(counts, self._at, _AT_ONCE.unpack_from(counts, self._at)[0] + count)

    def _open(self, file: Path) -> tuple[int, mmap.mmap]:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _SIZE)
        return descriptor, mmap.mmap(descriptor, _SIZE)
