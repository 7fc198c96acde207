"""The fresh process that runs artifacts, and its one caller.

It opens artifacts as a worker opens them and knows nothing of the model's Python. One process
serves all formats of an export: it starts while the first is written, and only ever holds one
artifact and one case. The inputs of a case lie in FOLDER/case.pt, and the outputs then in
FOLDER/answer.pt; both are read with weights_only.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from modelyard.archiver.signature import TensorSpec
from modelyard.exporter.child import Child, ChildEnded, answer_questions
from modelyard.exporter.errors import ParityError
from modelyard.handlers.models.backends import Artifact, open_artifact, type_name
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
        path = str(artifact.absolute())
        self._ask("load", "open", artifact=path, format=format, device=device, **options)

    def run(self, case: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the artifact gives.

        Args:
            case: names it in messages.
            inputs: on the CPU.

        Raises:
            ParityError: the artifact does not run.
        """
        torch.save(list(inputs), self._child.folder / _CASE)
        self._ask(f"run at {case}", "run")
        return tuple(torch.load(self._child.folder / _ANSWER, weights_only=True))

    def run_alike(
        self, case: str, inputs: Tensors, outputs: Sequence[TensorSpec], expected: Tensors
    ) -> Tensors:
        """Return what the artifact gives, in the dtypes of its outputs and as large as expected.

        Raises:
            ParityError: as `run`; or another number of outputs, dtype or shape.
        """
        found = self.run(case, inputs)
        if len(found) != len(outputs):
            names = ", ".join(spec.name for spec in outputs)
            raise ParityError(f"the artifact gives {len(found)} outputs, expected {names}")
        for spec, wanted, tensor in zip(outputs, expected, found, strict=True):
            right = f"{spec.dtype}[{','.join(map(str, wanted.shape))}]"
            if (seen := type_name(tensor)) != right:
                raise ParityError(f'output "{spec.name}" is {seen} at {case}, expected {right}')
        return found

    def find_sizes(
        self, own: Tensors, others: Sequence[Tensors], sizes: Sequence[int]
    ) -> list[int]:
        """Return the sizes of batches at which rows keep their bits, as `invariant.find_sizes`.

        Raises:
            ParityError: the process has ended.
        """
        torch.save([own, *others], self._child.folder / _CASE)
        return list(self._ask("run at batches", "find_sizes", sizes=list(sizes))["sizes"])

    def _ask(self, failed: str, method: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self._child.ask(method, **arguments)
        except ChildEnded as error:
            raise ParityError(f"the process that checks the artifact {error}") from error
        if "error" in answer:  # whatever it is, a worker could not serve it
            raise ParityError(f"the artifact does not {failed}: {answer['error']}")
        return answer


# -- inside the process ----------------------------------------------------------------------------


class _OpenArtifact:
    """The artifact that is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._artifact: Artifact | None = None

    def open(self, artifact: str, **options: Any) -> None:
        """Open an artifact, once the one before is gone: memory holds one."""
        self._artifact = None
        self._artifact = open_artifact(Path(artifact), **options)

    def run(self) -> None:
        """Write what it gives."""
        assert self._artifact is not None
        torch.save(run(self._artifact, self._case()), self._folder / _ANSWER)

    def find_sizes(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Return the sizes of batches at which rows keep their bits."""
        assert self._artifact is not None
        own, *others = self._case()
        return {"sizes": find_sizes(partial(run, self._artifact), own, others, sizes)}

    def _case(self) -> Any:
        return torch.load(self._folder / _CASE, weights_only=True)


def check_artifacts(folder: Path) -> None:
    """Answer questions about artifacts, of which large values lie in a folder."""
    answer_questions(_OpenArtifact(folder))


if __name__ == "__main__":
    check_artifacts(Path(sys.argv[1]))
