"""The process that checks, forked ahead of an author's code: it has nothing of that."""

import subprocess
import sys
from pathlib import Path

_ASKS = """
import json, os, sys
from pathlib import Path
from modelyard.exporter.child import Child, ChildEnded, answer_questions, fork_ahead

class Methods:
    def end(self):
        os._exit(7)

    def look(self):
        print("printed", flush=True)  # must not be taken for an answer
        return {"authors": "authors" in sys.modules, "path": "" in sys.path, "pid": os.getpid()}

    def fail(self, what):
        raise KeyError(what)

def main(folder):
    answer_questions(Methods())

folder = Path(sys.argv[1])
fork_ahead("none", main)
fork_ahead("checks", main)
import authors
child = Child("checks", folder)
child.start()
first = child.ask("look")
assert not first["authors"] and not first["path"] and first["pid"] != os.getpid(), first
assert child.ask("fail", what="x") == {"error": "KeyError: 'x'"}
try:
    child.ask("end")
except ChildEnded as error:
    print(error)
assert child.close() == 0
assert Child("checks", folder)._forked is None  # the next one is started anew
"""


def test_a_fork_has_nothing_of_the_author_and_ends_with_its_caller(tmp_path: Path) -> None:
    (tmp_path / "authors.py").write_text("")
    (tmp_path / "exchange").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", _ASKS, str(tmp_path / "exchange")],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "ended with exit code 7 and no result: " in run.stdout
    assert "printed" in (tmp_path / "exchange/stderr").read_text()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False)
    assert not left.stdout
