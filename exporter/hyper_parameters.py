"""Hyper-parameters of a checkpoint → arguments of the model's class."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.ingest.plain import Placeholder


class Arguments(dict[str, Any]):
    """A mapping whose keys are attributes too, as trainers hand hyper-parameters over."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def class_arguments(
    factory: Callable[..., Any], checkpoint: Checkpoint, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the keyword arguments that the class was built with in training.

    Args:
        factory: the class, or a function that makes the model.
        checkpoint: its hyper-parameters count where the format says how the class takes them.
        given: what the user says; replaces values of the same name.

    Raises:
        CheckpointError: an argument is a value that was refused, and the user gives none.
    """
    given = dict(given or {})
    how = checkpoint.hyper_parameters_name
    if how is None or not checkpoint.hyper_parameters:
        return given
    names, takes_all = _parameters(factory)
    if how != "kwargs" and how in names:
        found: dict[str, Any] = {how: Arguments(checkpoint.hyper_parameters)}
    else:
        # Only Lightning says that these are the class's arguments; others keep more beside them.
        takes_all = takes_all and checkpoint.kind.startswith("Lightning")
        found = {
            name: value
            for name, value in checkpoint.hyper_parameters.items()
            if isinstance(name, str) and (takes_all or name in names)
        }
    found.update(given)
    for name, value in found.items():
        if (refused := _refused(value)) is not None:
            raise CheckpointError(
                f'hyper-parameter "{name}" of "{checkpoint.path.name}" is {refused}, which was '
                "not loaded because that could run code; give its value with --model-args, name a "
                "function with --model that sets it, or use --trust"
            )
    return found


def _parameters(factory: Callable[..., Any]) -> tuple[set[str], bool]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set(), False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in kinds}
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _refused(value: Any) -> str | None:
    if isinstance(value, Placeholder):
        return value.dotted
    if isinstance(value, nn.Module):
        return None
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        return next((found for item in items if (found := _refused(item)) is not None), None)
    return None
