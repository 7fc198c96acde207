"""The fresh process that runs artifacts beside the checkpoint's outputs, and its one caller.

It opens artifacts as a worker opens them and knows nothing of the model's Python. One process
serves all formats of an export: it starts while the first is written, and only ever holds one
artifact and one case. It is asked

    {"open": {"artifact": …, "format": …, "device": …, "outputs": [[name, dtype, tolerance], …]}}
    {"case": text}      whose tensors lie in FOLDER/case.pt, which is read with weights_only
    {"runs": text}      the same of inputs alone

and answers {"measured": …}, {"runs": …} or {"error": …}.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from modelyard.base.scale import Scale
from modelyard.exporter.child import Child, ChildEnded, answer_questions
from modelyard.exporter.errors import ParityError, cause
from modelyard.handlers.models.backends import Artifact, open_artifact, type_name
from modelyard.handlers.proof.agree import compare, run

_Specs = Sequence[tuple[str, str, float]]
"""Name, dtype and tolerance of every output."""


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

    def open(
        self, artifact: Path, format: str, device: str, outputs: _Specs, trusted: Sequence[str] = ()
    ) -> None:
        """Load an artifact in the place of the one before.

        Args:
            artifact: the file, complete and closed.
            format: format as in `modelyard.handlers.models.backends`.
            device: where it is to run.
            outputs: name, dtype and tolerance of each.
            trusted: operators that a program may call beside those of the list.

        Raises:
            ParityError: it does not load; as for `measure`, the message names no format.
        """
        task = {"artifact": str(artifact.absolute()), "format": format, "device": device}
        self._ask({"open": {**task, "outputs": outputs, "trusted": trusted}})

    def measure(
        self,
        case: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        scales: Sequence[Scale],
        unread: Sequence[Tensor | None] = (),
    ) -> list[dict[str, Any]]:
        """Run one case; return per output what `modelyard.handlers.proof.agree.compare` finds.

        Args:
            case: names it in messages.
            inputs: on the CPU.
            outputs: the checkpoint's.
            scales: by which each output is measured.
            unread: of each output the places that are not compared; empty for none.

        Raises:
            ParityError: the artifact does not run, or gives other outputs than these.
        """
        tensors = {
            "inputs": list(inputs),
            "outputs": list(outputs),
            "unread": list(unread) or [None] * len(outputs),
            "scales": [(torch.tensor(each.centre), torch.tensor(each.spread)) for each in scales],
        }
        torch.save(tensors, self._child.folder / "case.pt")
        measured: list[dict[str, Any]] = self._ask({"case": case})["measured"]
        return measured

    def answers(self, case: str, inputs: Sequence[Tensor]) -> bool:
        """Return whether the artifact gives anything for inputs that the checkpoint refuses."""
        torch.save({"inputs": list(inputs)}, self._child.folder / "case.pt")
        return bool(self._ask({"runs": case})["runs"])

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
    """The artifact that is open, and what its outputs have to be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._artifact: Artifact | None = None
        self._specs: _Specs = ()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if "open" in question:
                self._artifact = None  # before the next is there: memory holds one
                self._open(question["open"])
                return {}
            if "runs" in question:
                return {"runs": self._runs()}
            return {"measured": self._run_case(question["case"])}
        except ParityError as error:
            return {"error": str(error)}

    def _open(self, task: Mapping[str, Any]) -> None:
        artifact, self._specs = Path(task["artifact"]), task["outputs"]
        try:
            self._artifact = open_artifact(
                artifact, task["format"], task["device"], trusted=task["trusted"]
            )
        # Each format's library fails in its own ways; all mean that a worker could not load it.
        except Exception as error:
            raise ParityError(f"the artifact does not load: {cause(error)}") from error

    def _runs(self) -> bool:
        assert self._artifact is not None
        try:
            run(self._artifact, torch.load(self._folder / "case.pt", weights_only=True)["inputs"])
        # Each format's library refuses in its own ways.
        except Exception:
            return False
        return True

    def _run_case(self, case: str) -> list[dict[str, Any]]:
        """Compare one case's outputs: their number, then dtypes and shapes, then values."""
        assert self._artifact is not None
        tensors = torch.load(self._folder / "case.pt", weights_only=True)
        expected = tensors["outputs"]
        try:
            actual = run(self._artifact, tensors["inputs"])
        except Exception as error:
            raise ParityError(f"the artifact does not run at {case}: {cause(error)}") from error
        if len(actual) != len(expected):
            listed = ", ".join(name for name, _, _ in self._specs)
            raise ParityError(f"the artifact gives {len(actual)} outputs, expected {listed}")
        measured = []
        scales = [Scale(*(part.numpy() for part in each)) for each in tensors["scales"]]
        for (name, dtype, tolerance), target, tensor, scale, unread in zip(
            self._specs, expected, actual, scales, tensors["unread"], strict=True
        ):
            right = f"{dtype}[{','.join(map(str, target.shape))}]"
            if (seen := type_name(tensor)) != right:
                raise ParityError(f'output "{name}" is {seen} at {case}, expected {right}')
            if unread is not None:
                tensor = torch.where(unread, target, tensor)
            measured.append(compare(target, tensor, tolerance, scale))
        return measured


if __name__ == "__main__":
    answer_questions(_OpenArtifact(Path(sys.argv[1])).answer)
