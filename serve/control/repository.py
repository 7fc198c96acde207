"""The models of the store by name: what is there, loaded or not; loading and unloading.

As the Open Inference Protocol has it. Changes are off unless the settings allow them, since clients
reach them where they infer.
"""

from dataclasses import dataclass, field

from modelyard.archiver.untrusted.names import check_name
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.errors import FileNotInStore, Forbidden, ModelNotFound


@dataclass(eq=False)
class Repository:
    """What may be loaded, and who asks for it by name."""

    lifecycle: Lifecycle
    is_open: bool
    """Whether models may be loaded and unloaded."""
    setting: str = "allow_load"
    """What says so, for messages."""
    _unloaded: dict[str, list[tuple[str, ModelSpec]]] = field(default_factory=dict)
    """Version that was served and how, of models by name; the default version first."""

    def index(self, only_ready: bool = False) -> list[dict[str, str]]:
        """Return every model version and its state; those that were unloaded among them."""
        found = []
        for model in self.lifecycle.registry:
            state, reason = model.state
            if state == "READY" or not only_ready:
                found.append(_entry(model.name, model.version, state, reason))
        if not only_ready:
            for name, versions in self._unloaded.items():
                if not self._is_served(name):  # by the management API, since then
                    found += [
                        _entry(name, version, "UNAVAILABLE", "unloaded") for version, _ in versions
                    ]
        return found

    async def load(self, name: str) -> None:
        """Serve the archive of this name, or what was unloaded under it; answers when it is ready.

        What is served already stays as it is, but for versions without workers, which get some.

        Raises:
            Forbidden: the settings do not allow it.
            ArchiveError, ServeError: nothing was changed, or not all of it.
        """
        self._check(name)
        check_name(name)
        if self._is_served(name):
            for model in self.lifecycle.registry.versions(name):
                if not model.pool.slots:
                    await self.lifecycle.scale(model, model.pool.least or 1)
            return
        for each in list(self._unloaded.get(name, ())):
            await self.lifecycle.add(each[1], None, waits=True, saves=True)
            self._unloaded[name].remove(each)
        if not self._is_served(name):
            try:
                await self.lifecycle.register(name, name)
            except FileNotInStore:  # as another policy names files, whole
                await self.lifecycle.register(f"{name}.mar", name)

    async def unload(self, name: str) -> None:
        """Remove all versions of a model, whose archives stay in the store.

        Raises:
            Forbidden: the settings do not allow it.
            ModelNotFound, ServeError.
        """
        self._check(name)
        registry = self.lifecycle.registry
        # The default one goes last.
        for model in sorted(registry.versions(name), key=registry.is_default):
            spec = ModelSpec(model.url, name, model.pool.least or None, options=model.options)
            await self.lifecycle.unregister(model)
            self._unloaded.setdefault(name, []).insert(0, (model.version, spec))

    def _check(self, name: str) -> None:
        if self.is_open:
            return
        reason = (
            f"This API loads and unloads nothing: the setting {self.setting} is off. The "
            "management API registers and removes models"
        )
        if not self._is_served(name):
            raise ModelNotFound(name, f". {reason}")
        raise Forbidden(reason)

    def _is_served(self, name: str) -> bool:
        return any(model.name == name for model in self.lifecycle.registry)


def _entry(name: str, version: str, state: str, reason: str) -> dict[str, str]:
    return {"name": name, "version": version, "state": state, "reason": reason}
