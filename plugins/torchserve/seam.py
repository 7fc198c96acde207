"""What core's workers find of this plug-in: their `Dialect`. Importing it loads nothing."""

import importlib
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelyard.handlers.context import Context
    from modelyard.handlers.metrics import Reporter
    from modelyard.serve.worker.codec import Rules
    from modelyard.serve.worker.dialect import Envelope

SHIM = Path(__file__).parent / "shim"
"""Folder of the package `ts`."""


class TorchServeDialect:
    """The seam `serve.worker.dialect.Dialect`; `ts` is ours, whatever an archive ships."""

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules of `ts`, in full."""
        files = (file.relative_to(SHIM).with_suffix("") for file in SHIM.rglob("*.py"))
        return frozenset(".".join(file.parts).removesuffix(".__init__") for file in files)

    @property
    def handlers(self) -> Mapping[str, str]:
        """The handlers that TorchServe has built in."""
        handlers: Mapping[str, str] = self._shim.BUILT_IN
        return handlers

    def prepare(self) -> None:
        """Put the folder of `ts` on the path, and import what knows its handlers."""
        sys.path.insert(0, str(SHIM))
        self._shim = importlib.import_module("ts.model_loader")

    def begin_log(self) -> None:
        """Begin the log that scripts search."""
        from modelyard.plugins.torchserve.worker import begin_log

        begin_log()

    def choose_rules(self, message: Mapping[str, Any]) -> "Rules":
        """Return what a LOAD message asks for."""
        from modelyard.plugins.torchserve.worker import choose_rules

        return choose_rules(message)

    def metrics(self, context: "Context", message: Mapping[str, Any]) -> "Reporter":
        """Return TorchServe's cache of metrics, with those that the server declares."""
        declared = (message.get("metrics") or {}).get("declared")
        metrics: Reporter = self._shim.WorkerMetrics(context, declared)
        return metrics

    def envelope(self, name: str) -> "type[Envelope]":
        """Return what `service_envelope` names."""
        envelope: type[Envelope] = self._shim.find_envelope(name)
        return envelope


DIALECT = TorchServeDialect()
"""What `modelyard.policies` names."""
