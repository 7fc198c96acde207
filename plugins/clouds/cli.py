"""The commands `modelyard sagemaker serve`, `vertex serve` and `azureml serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from modelyard.base.terminal import err
from modelyard.plugins.clouds.contract import (
    NAME,
    CloudPolicy,
    Contract,
    read_azureml,
    read_sagemaker,
    read_vertex,
)
from modelyard.serve.cli import known_errors, run_attached
from modelyard.serve.settings import load_settings

DEFAULTS: dict[str, Any] = {
    "host": "::",
    "auth": "management",
    "network": "all",
    "state_dir": Path("/tmp/modelyard"),
}
"""Settings of a container behind a cloud's own gateway; the folder's code may call other services,
as there."""


def make_app(read: Callable[[Path | None], Contract], of: str) -> typer.Typer:
    """Return the commands of one cloud."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=f"{of} container.")
    app.callback()(lambda: None)

    @app.command()
    def serve(
        model_dir: Annotated[
            Path | None, typer.Option(help="Model folder; default: the one that is mounted.")
        ] = None,
        install_requirements: Annotated[
            bool, typer.Option(help="Install code/requirements.txt, for the model's workers alone.")
        ] = False,
    ) -> None:
        """Serve a model folder as the cloud's own container would; stays attached."""
        with known_errors():
            raise typer.Exit(run(read(model_dir), install_requirements or None))

    return app


def run(contract: Contract, installs: bool | None) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ServeError: a setting is wrong, or there is no model folder.
    """
    said = {name: value for name, value in contract.settings.items() if value is not None}
    ours = load_settings({"install_requirements": installs}, defaults=DEFAULTS | said)
    contract = replace(
        contract, installs=ours.install_requirements, folder=contract.folder.absolute()
    )
    store, reads = ours.state_dir / "model_store", (contract.folder, *contract.reads)
    if not contract.has_several:
        contract.archive(NAME, contract.folder, store)
    if contract.requirements(contract.folder) and not contract.installs:
        err.print("code/requirements.txt is not installed; --install-requirements does it")
    settings = ours.model_copy(
        update={"model_store": store, "read_paths": (*reads, *ours.read_paths)}
    )
    return run_attached(settings, partial(CloudPolicy, contract))


sagemaker_app = make_app(read_sagemaker, "SageMaker's PyTorch")
vertex_app = make_app(read_vertex, "Vertex AI's prediction")
azureml_app = make_app(read_azureml, "Azure ML's inference")
