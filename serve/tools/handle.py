"""`serve`, as a program calls it: a server in the background, and what holds on to it."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.base.exits import describe_exit
from modelyard.serve.control.state import StateDir, describe_running
from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from modelyard_client import Client

    from modelyard.serve.settings import Settings

STOP_GRACE_S = 10.0
"""Beyond the server's own drain time."""

logger = logging.getLogger(__name__)


class Server:
    """A running server; `with serve(…) as server:` stops it at the end of the block.

    It is a process of its own, as that of `modelyard serve start`: it outlives the program unless
    it is stopped, and `modelyard serve status` and `stop` know it.

    Attributes:
        url: URL of the inference API.
        about: what it says of itself: pid, addresses, log, warnings.
    """

    def __init__(
        self, process: subprocess.Popen[str], about: dict[str, Any], settings: "Settings"
    ) -> None:
        self.url = str(about["inference"])
        self.about = about
        self._process = process
        self._settings = settings

    def __repr__(self) -> str:
        ended = "" if self._process.poll() is None else ", stopped"
        return f"<Server {self.url}, pid {self._process.pid}{ended}>"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def client(self, **options: Any) -> "Client":
        """Return a client of it, with its token and certificate.

        Args:
            options: options of `Client`, as `timeout_s`.
        """
        from modelyard_client import Client

        from modelyard.serve.tools.client import find_endpoint

        at = find_endpoint("inference", StateDir(self._settings.state_dir))
        return Client(at.url, **{"token": at.token, "ca": at.tls, **options})

    def stop(self) -> None:
        """Answer what was accepted, then end the server; one that has ended is left alone.

        Raises:
            StartError: it has not ended in time.
        """
        self._process.terminate()
        drain_s = self._settings.drain_delay_s + self._settings.drain_timeout_s
        try:
            self._process.wait(drain_s + STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pid = self._process.pid
            raise StartError(
                f"pid {pid} has not ended; `kill -9 {pid}` ends it without answers"
            ) from None


def serve(
    *models: str | Path,
    model_store: str | Path | None = None,
    config: str | Path | None = None,
    host: str | None = None,
    port: int | None = None,
    management_port: int | None = None,
    metrics_port: int | None = None,
    grpc_port: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    servers: int | None = None,
    auth: str | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool | None = None,
    access_log: bool | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
    explain_share: float | None = None,
    trusted_keys: str | Path | None = None,
    require_signature: bool | None = None,
    require_proven: bool | None = None,
    accept_changed: bool | None = None,
    install_requirements: bool | None = None,
    require_sandbox: bool | None = None,
    state_dir: str | Path | None = None,
) -> Server:
    """Start a server in the background; return when its models are ready.

    The options are those of `modelyard serve start`; one that is None is what the configuration
    file, the environment or the default says. Warnings go to this module's log.

    Args:
        models: NAME or NAME=FILE of the model store, or ALL; a `Path` is an archive, whose folder
            is the model store.
        model_store: folder of the archives.
        config: YAML file with any of the settings of docs/settings.md.
        host: address; default 127.0.0.1.
        port: port of the inference API; default 8080. 0 lets the system choose, as for the
            other two.
        management_port: port of the management API; default 8081.
        metrics_port: port of the metrics API; default 8082.
        grpc_port: port of gRPC, with the extra grpc; default none.
        device: device of the models: auto, cpu or cuda[:N].
        workers: workers per model, shared among the servers; default by cores.
        servers: server processes behind the inference port; default 1.
        auth: tokens: auto (off on loopback), always, never.
        tls_cert: certificate (PEM); all three APIs then speak TLS.
        tls_key: private key of the certificate (PEM).
        token_file: tokens that stay, as `modelyard token new` writes them.
        insecure: allow auth never on an address that others reach.
        access_log: write a line for each request.
        log_format: format of all logs: text or json.
        log_level: least level of what is logged: debug, info, warning or error; default info.
        explain_share: share of the predictions that are explained in the background; default 0.
        trusted_keys: file of public keys whose signatures are accepted.
        require_signature: serve only what a trusted key signed.
        require_proven: serve only what was proven on these versions.
        accept_changed: restore archives that changed since they ran.
        install_requirements: install what an archive requires, into an environment of its own.
        require_sandbox: refuse to start where workers lack a wall.
        state_dir: folder of pid file, keys and logs; one server each.

    Raises:
        StartError: a setting is wrong, a server runs already, or the server's own reason.
    """
    given = locals()
    from modelyard.serve.settings import load_settings, unknown_variables

    del given["config"]
    stores = {model.parent.absolute() for model in models if isinstance(model, Path)}
    if model_store is not None:
        stores.add(Path(model_store).absolute())
    if len(stores) > 1:
        names = " and ".join(sorted(map(str, stores)))
        raise StartError(f"the archives are in {names}; a server serves those of one folder")
    named = [model.name if isinstance(model, Path) else model for model in models]
    given |= {"models": tuple(named) or None, "model_store": stores.pop() if stores else None}
    settings = load_settings(given, Path(config) if config else None)
    for notice in unknown_variables():
        logger.warning("%s", notice)
    state = StateDir(settings.state_dir)
    process, about = start_detached(settings, state, lambda model, text: None)
    for warning in about["warnings"]:
        logger.warning("%s", warning)
    return Server(process, about, settings)


SERVER = ("-m", "modelyard.serve.server")


def start_detached(
    settings: "Settings",
    state: StateDir,
    on_loading: Callable[[str, str], None],
    program: Sequence[str] = SERVER,
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a server in a session of its own; return it, and what it says of itself when ready.

    Args:
        on_loading: called with a model's name and what happens to it.
        program: what the interpreter runs.

    Raises:
        StartError: a server runs already; the server's own words, or where its log is.
    """
    if (running := state.running()) is not None:
        raise StartError(describe_running(running))
    try:
        state.create()
        log = state.log_file.open("ab")
    except OSError as error:
        raise StartError(state.why_unusable(error)) from error
    with log:
        process = subprocess.Popen(
            [sys.executable, "-P", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=state.root,
            start_new_session=True,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(settings.model_dump_json())
        process.stdin.close()
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return process, dict(event)
            if event["event"] == "error":
                raise StartError(event["message"])
            if event["event"] == "loading":
                on_loading(event["model"], event["text"])
    except (KeyboardInterrupt, BrokenPipeError):
        process.terminate()
        process.wait()
        raise
    finally:
        process.stdout.close()
    ended = describe_exit(process.wait())
    raise StartError(f"the server ended with {ended}; its log is {state.log_file}")
