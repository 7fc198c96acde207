"""The reaper: the parent of one worker, and of all that its handler starts and leaves behind.

No process leaves the tree of its subreaper, whatever session it is in and whoever its parent was:
so what a handler has started is what this process has below it. It takes each of them as it ends,
and ends all of them with the worker: killed in rounds until there are none, since a chain of
processes that fork and exit does not go on as fast as each is killed. The server only asks for
that, and the kernel does when the server has died.
"""

import contextlib
import os
import signal
from typing import NoReturn

from modelyard.serve.dataplane import wire
from modelyard.serve.walls import kernel
from modelyard.serve.walls.raising import die_with_parent

MOST_AT_ONCE = 1000
"""Processes that are taken before it looks for what it is asked."""
ROUND_S = 0.001
"""Longest time from one round of kills to the next."""


def fork_worker() -> None:
    """Become the reaper of a child, in which this returns: that one is the worker.

    The caller's life must be tied to the server's; the worker's is to its reaper's.
    """
    reaper, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, wire.END)
    if worker := os.fork():
        _reap(worker)
    os.setsid()  # a signal to its group is not for the reaper
    die_with_parent(reaper)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reap(worker: int) -> NoReturn:
    """Take what ends; end when nothing is left, as the worker did."""
    os.closerange(0, 1 << 16)  # whoever has the other ends waits for the worker's
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # it may end as the worker did
    status, is_wanted = 0, True
    with contextlib.suppress(ChildProcessError):  # there is nothing left
        while True:
            for _ in range(MOST_AT_ONCE):
                pid, code = os.waitpid(-1, os.WNOHANG)
                if pid == worker:
                    status, is_wanted = code, False
                elif not pid:
                    break
            if not is_wanted:
                for child in reversed(kernel.children()):  # the newest live longest
                    with contextlib.suppress(PermissionError):  # without walls, it may be root's
                        os.kill(child, signal.SIGKILL)
            rest_s = 0 if pid else 3600 if is_wanted else ROUND_S
            came = signal.sigtimedwait((signal.SIGCHLD, wire.END), rest_s)
            is_wanted = is_wanted and (came is None or came.si_signo != wire.END)
    if (exit_code := os.waitstatus_to_exitcode(status)) < 0:
        os.kill(os.getpid(), -exit_code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-exit_code,))
    os._exit(exit_code)
