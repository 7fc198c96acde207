"""The command `modelyard kserve`: the entry point of a container that KServe runs.

Facts of KServe 0.21: the container is called on one port (`PORT`, else 8080), models lie in
/mnt/models, which is read-only, and arguments that the controller adds to an explainer's have
underscores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from modelyard.base.terminal import err
from modelyard.plugins.cluster.kserve.layout import Archives, TorchServes, find_layout
from modelyard.serve.cli import known_errors, run_attached
from modelyard.serve.control.sizing import this_machine
from modelyard.serve.errors import StartError
from modelyard.serve.settings import ENV_PREFIX, Settings, load_settings

EVERYWHERE = "::"
"""A container is called from outside of it, by IPv4, IPv6 or both."""
PORT = 8080
GRPC_PORT = 7070
"""TorchServe's, which KServe's own runtime has too."""
DEFAULTS: dict[str, Any] = {
    "host": EVERYWHERE,
    "auth": "management",
    "drain_delay_s": 5.0,
    "drain_timeout_s": 20.0,
    "state_dir": Path("/tmp/modelyard"),
}
"""Settings of a server behind KServe's gateway, which knows no tokens of ours, in a pod.

Both times of draining fit into the 30 s that Kubernetes gives where a pod names none: with Knative
it must not.
"""

kserve_app = typer.Typer(add_completion=False)


@kserve_app.command()
def kserve(
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model_name",
            "--model-name",
            help="Name of the InferenceService; names a single model.",
        ),
    ] = None,
    model_dir: Annotated[
        Path,
        typer.Option("--model_dir", "--model-dir", help="Folder of the storage initializer."),
    ] = Path("/mnt/models"),
    http_port: Annotated[
        int | None,
        typer.Option("--http_port", "--http-port", help="Default: the variable PORT, then 8080."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Per model, up to one per core; default, and 0: by cores."),
    ] = None,
    predictor_host: Annotated[
        str | None,
        typer.Option(
            "--predictor_host",
            "--predictor-host",
            help="Given to explainers; explanations are of the archive's own network.",
        ),
    ] = None,
) -> None:
    """Serve what lies in a folder, as KServe calls it; stays attached.

    Example: modelyard kserve --model_name digits --model_dir /mnt/models
    """
    with known_errors():
        port = _port() if http_port is None else http_port
        workers = count_workers(workers, this_machine().cores)
        ours = load_settings({}, defaults=DEFAULTS)
        state_dir = ours.state_dir
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(
                f"cannot use the state folder {state_dir}: {error.strerror}; mount an emptyDir "
                f"there, or name another folder in {ENV_PREFIX}STATE_DIR"
            ) from error
        model_dir = model_dir.absolute()
        found = find_layout(model_dir, model_name, state_dir / "model_store")
        if predictor_host is not None:
            err.print(f"explanations are of the network in {model_dir}, not of {predictor_host}")
        if isinstance(found, TorchServes):
            _become_torchserve(found, port, ours, workers)
            return
        settings = own_settings(found, port, workers)
        raise typer.Exit(run_attached(settings))


def own_settings(found: Archives, port: int, workers: int | None = None) -> Settings:
    """Return the settings of a container; variables go before what KServe does not say.

    Raises:
        StartError: a variable is wrong.
    """
    return load_settings(
        {
            "model_store": found.store,
            "models": found.models,
            "port": port,
            "grpc_port": GRPC_PORT,
            "workers": workers,
        },
        defaults=DEFAULTS,
    )


def count_workers(said: int | None, cores: int) -> int | None:
    """Return the workers per model; None leaves them to the cores.

    KServe writes `containerConcurrency` there, which says how many requests a pod takes at once: 0
    is any number, and a copy of the model for each of a hundred would fill the pod's memory.
    """
    return min(said, cores) if said else None


def _port() -> int:
    """Return the port that Knative names, or the one that KServe calls."""
    text = os.environ.get("PORT", str(PORT))
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise StartError(f"PORT is {text!r}; expected the number of a port")
    return int(text)


def _become_torchserve(found: TorchServes, port: int, ours: Settings, workers: int | None) -> None:
    """Replace this process by the drop-in, with the file's settings but for where it listens."""
    from modelyard.plugins.torchserve import launcher
    from modelyard.plugins.torchserve.properties import format_properties, parse_properties

    try:
        given = parse_properties(found.config.read_text(encoding="utf-8"))
        file = ours.state_dir / "config.properties"
        settings = contained(given, port, ours.drain_delay_s, workers)
        file.write_text(format_properties(settings), encoding="utf-8")
        os.chdir(ours.state_dir)  # logs and keys are written where it is started
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot use {found.config}: {error}") from error
    launcher.become_server(
        ["--start", "--foreground", "--model-store", str(found.store), "--ts-config", str(file)]
    )


def contained(
    given: dict[str, str], port: int, drain_delay_s: float, workers: int | None = None
) -> dict[str, str]:
    """Return a `config.properties` for a container that is called on one port.

    KServe's own files name 8085, where its wrapper of TorchServe forwards to. Management stays
    inside of the pod. As behind that wrapper tokens are off, both of KServe's protocols are spoken
    and `instances` are taken apart by the envelope that KServe sets; the file may say otherwise.
    The start is strict: a pod that is ready without its models would be sent requests.
    """
    settings = {
        "disable_token_authorization": "true",
        "drain_delay_s": str(drain_delay_s),
        "grpc_inference_address": EVERYWHERE,
        "metrics_address": f"http://[{EVERYWHERE}]:8082",
        "service_envelope": "kserve",
        "strict_start": "true",
        "ts_open_inference_protocol": "oip",
        **given,
        "inference_address": f"http://[{EVERYWHERE}]:{port}",
        "management_address": "http://127.0.0.1:8081",
    }
    settings["metrics_address"] = settings["metrics_address"].replace("//0.0.0.0:", "//[::]:")
    if not {"load_models", "model_snapshot"} & given.keys():
        settings["load_models"] = "all"
    if workers is not None:
        settings["default_workers_per_model"] = str(workers)
    return settings
