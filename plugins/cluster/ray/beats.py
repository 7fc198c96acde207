"""Signs that a replica moves: it writes one a second, and its server ends it when none come.

Ray notices a replica that hangs as well, but then gives it time for what it holds, minutes that are
for draining. Killed, it is any cell that dies: what it held is sent to another one at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal

logger = logging.getLogger(__name__)

EVERY_S = 1.0
MOST_MISSED = 15
"""Most beats missed in a row. As long as Ray waits for an answer, three times 5 s: nobody is killed
for being slow whom Ray would have left alone."""
BEAT = b"."


class Beats:
    """Beats from the event loop that answers requests, so that they stop when it does.

    Args:
        every_s: between two.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.pipe, self._writing = os.pipe()
        """`pipe` is the end where they are read."""
        os.set_blocking(self._writing, False)
        self._task = asyncio.create_task(self._run(every_s))

    async def stop(self) -> None:
        """End them."""
        self._task.cancel()
        await asyncio.wait([self._task])
        os.close(self._writing)
        os.close(self.pipe)

    async def _run(self, every_s: float) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):  # the server hangs, and reads none
                os.write(self._writing, BEAT)
            await asyncio.sleep(every_s)


def watch(pipe: int, replica: int, every_s: float = EVERY_S) -> None:
    """Kill the replica when it beats no more; in a thread of the server's process.

    Intervals without a beat are counted, not time: where both processes stood still (a machine that
    slept, a frozen container), one is missed.

    Args:
        pipe: where its beats are read; it is watched from the first one on.
        replica: its process id.
        every_s: between two beats.
    """
    missed = -1
    while missed < MOST_MISSED:
        if select.select([pipe], [], [], every_s if missed >= 0 else None)[0]:
            if not os.read(pipe, 1 << 16):
                return  # it has ended
            missed = 0
        else:
            missed += 1
    logger.error(
        "the replica, process %d, has not moved for %g s; it is killed, so that what it holds goes "
        "to another cell",
        replica,
        MOST_MISSED * every_s,
    )
    os.kill(replica, signal.SIGKILL)
