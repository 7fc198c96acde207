"""The fresh process that runs artifacts, and its one caller.

It opens artifacts as a worker opens them and knows nothing of the model's Python. One process
serves all formats of an export: it starts while the first is written, and only ever holds one
artifact and one case. It is asked

    {"open": {"artifact": …, "format": …, "device": …, "trusted": […], "tf32": false}}
    {"case": text}      whose inputs lie in FOLDER/case.pt, and the outputs then in FOLDER/answer.pt

    {"sizes": [1, 2, …]}  of batches of the rows in case.pt, and answers those that keep their bits

and answers {} or {"error": …}. Both files are read with weights_only.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from modelyard.exporter.child import Child, ChildEnded, answer_questions
from modelyard.exporter.errors import ParityError, cause
from modelyard.handlers.models.backends import Artifact, open_artifact
from modelyard.handlers.models.invariant import Tensors, find_sizes
from modelyard.handlers.proof.agree import run

_CASE, _ANSWER = "case.pt", "answer.pt"


class Checker:
    """The process from outside; it is started when it is entered, and again when it has died.

    Args:
        folder: an empty folder for the exchange; what lies there does not grow with the cases.
    """

    def __init__(self, folder: Path) -> None:
        self._child = Child(__name__, folder)

    def __enter__(self) -> Self:
        self._child.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def open(self, artifact: Path, format: str, device: str, **options: Any) -> None:
        """Load an artifact in the place of the one before.

        Args:
            artifact: the file, complete and closed.
            format: format as in `modelyard.handlers.models.backends`.
            device: where it is to run.
            options: `trusted` and `tf32` of `open_artifact`.

        Raises:
            ParityError: it does not load; as for `run`, the message names no format.
        """
        task = {"artifact": str(artifact.absolute()), "format": format, "device": device}
        self._ask({"open": {**task, **options}})

    def run(self, case: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the artifact gives.

        Args:
            case: names it in messages.
            inputs: on the CPU.

        Raises:
            ParityError: the artifact does not run.
        """
        torch.save(list(inputs), self._child.folder / _CASE)
        self._ask({"case": case})
        return tuple(torch.load(self._child.folder / _ANSWER, weights_only=True))

    def find_sizes(
        self, own: Tensors, others: Sequence[Tensors], sizes: Sequence[int]
    ) -> list[int]:
        """Return the sizes of batches at which rows keep their bits, as `invariant.find_sizes`.

        Raises:
            ParityError: the process has ended.
        """
        torch.save([own, *others], self._child.folder / _CASE)
        return list(self._ask({"sizes": list(sizes)})["sizes"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = self._child.ask(question)
        except ChildEnded as error:
            raise ParityError(f"the process that checks the artifact {error}") from error
        if "error" in answer:
            raise ParityError(answer["error"])
        return answer


# -- inside the process ----------------------------------------------------------------------------


class _OpenArtifact:
    """The artifact that is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._artifact: Artifact | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if (task := question.get("open")) is not None:
                self._artifact = None  # before the next is there: memory holds one
                path = Path(task.pop("artifact"))
                self._artifact = open_artifact(path, **task)
                return {}
            assert self._artifact is not None
            inputs = torch.load(self._folder / _CASE, weights_only=True)
            if "sizes" in question:
                answer = partial(run, self._artifact)
                return {"sizes": find_sizes(answer, inputs[0], inputs[1:], question["sizes"])}
            torch.save(run(self._artifact, inputs), self._folder / _ANSWER)
        # Each format's library fails in its own ways; all mean that a worker could not serve it.
        except Exception as error:
            failed = (
                f"run at {question.get('case', 'batches')}" if "open" not in question else "load"
            )
            return {"error": f"the artifact does not {failed}: {cause(error)}"}
        return {}


def check_artifacts(folder: Path) -> None:
    """Answer questions about artifacts, of which large values lie in a folder."""
    answer_questions(_OpenArtifact(folder).answer)


if __name__ == "__main__":
    check_artifacts(Path(sys.argv[1]))
