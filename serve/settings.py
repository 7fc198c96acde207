"""A server's settings: defaults < configuration file < environment < command line."""

import ipaddress
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.base.nearest import did_you_mean
from modelyard.serve.errors import StartError, WrongUsage

ENV_PREFIX = "MODELYARD_"
MOST_WORKERS = 1024
"""Workers of one model, at most."""
UIDS = "FIRST-LAST, as in 60706-61183, without root"
Share = Annotated[int, Field(ge=1, le=1000)]


def _split(value: Any) -> Any:
    """Take a comma or space separated list where a list is expected."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _form(pattern: str, expected: str) -> AfterValidator:
    """Return what takes texts of one form."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


def _lines(value: Any) -> Any:
    """Take lines where a list is expected; a semicolon ends one, too."""
    return value.replace(";", "\n").splitlines() if isinstance(value, str) else value


def _yaml(value: Any) -> Any:
    """Take YAML where a mapping is expected, as in the environment."""
    try:
        return parse_yaml(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def _users(value: str) -> str:
    first, _, last = value.partition("-")
    if value and not 0 < int(first) <= int(last):
        raise ValueError(f"expected {UIDS}")
    return value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    return path


Split = BeforeValidator(_split)
Place = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Places = Annotated[tuple[Place, ...], Split]
Words = Annotated[tuple[str, ...], Split]
Pattern = Annotated[str, AfterValidator(_pattern)]
_ALERTS = r"https?://[\w.:\[\]-]+(/[\x21-\x7e]*)?"
_HOST = r"\[[0-9A-Fa-f:.]+\]"
Host = Annotated[
    str,
    _form(rf"\*|[\w.-]+|{_HOST}", "the name of a host; leave out scheme and port"),
    AfterValidator(lambda name: name.lower().strip("[]")),
]
Origin = Annotated[
    str,
    _form(
        rf"(?ai)\*|https?://([\w.-]+|{_HOST})(:\d{{1,5}})?", "an origin, as in https://app.example"
    ),
    AfterValidator(str.lower),
]


def default_state_dir() -> Path:
    """Return the folder for pid file, keys, logs and state, per the XDG base directory rules."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "modelyard"


def own_folder(name: str) -> Path:
    """Return where this user keeps files on a machine, unless another folder is named.

    Not below the home, which several machines may share.
    """
    return Path(tempfile.gettempdir()) / f"modelyard-{os.getuid()}" / name


@dataclass(frozen=True)
class Address:
    """A host and port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose."""
    path: Path | None = None
    """Path of a Unix socket; host and port say nothing then."""
    is_tls: bool = False
    option: str = "port"
    """What chooses the port, for messages."""
    is_shared: bool = False
    """Whether other processes listen there too: the kernel gives each connection to one of them."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """Return the address as a client writes it."""
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}"


PROXY_HEADERS = "a proxy's headers (Forwarded, X-Forwarded-…, X-Real-IP, Via)"
"""Headers of what did not come from this machine, as a person reads them."""


def _is_open(data: Mapping[str, Any]) -> bool:
    """Return whether nobody needs a token."""
    return bool(data.get("auth") == "never")


CONFLICTS: tuple[tuple[str, Callable[[Any, Mapping[str, Any]], object], str], ...] = (
    (
        "tls_key",
        lambda key, data: "tls_cert" in data and (key is None) != (data["tls_cert"] is None),
        "tls_cert and tls_key go together; one is missing",
    ),
    (
        "token_file",
        lambda file, data: _is_open(data) and (file or data.get("tokens")),
        "auth is never, so no token would be asked for",
    ),
    (
        "insecure",
        lambda value, data: (
            _is_open(data) and not value and not Address(data.get("host", "")).is_loopback
        ),
        "auth: never lets everybody who reaches {host} replace the models; give --insecure to "
        "mean that",
    ),
    (
        "insecure",
        lambda value, data: _is_open(data) and not value and "*" in data.get("allowed_origins", ()),
        "auth: never and allowed_origins: * let every web page replace the models; give "
        "--insecure to mean that",
    ),
    (
        "shared_memory",
        lambda value, data: value and not Address(data.get("host", "")).is_loopback,
        "host is {host}, and its clients would name files of this machine; set host: 127.0.0.1",
    ),
    (
        "incidents",
        lambda value, data: value and data.get("servers", 1) > 1,
        "servers is {servers}, and nobody would know which of them remembers an answer; set "
        "servers: 1",
    ),
    (
        "require_sandbox",
        lambda value, data: value and not data.get("sandbox"),
        "the setting sandbox is off",
    ),
    (
        "require_signature",
        lambda value, data: value and not data.get("trusted_keys"),
        "name the file of public keys with --trusted-keys",
    ),
    (
        "reload",
        lambda value, data: value and data.get("require_signature"),
        "what is edited is not signed, and require_signature is on",
    ),
)
"""Setting, what makes it wrong beside those that are declared before it, and why."""


class Settings(BaseModel):
    """One server's settings; frozen. Every field can be set as MODELYARD_<NAME> too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), validate_default=True
    )

    model_store: Place = Path("model_store")
    """Folder of the archives that may be served."""
    models: Words = ()
    """NAME or NAME=FILE of the store, or ALL, or URL#sha256=DIGEST; empty restores what was served
    last."""
    cache_dir: Place = Field(default_factory=lambda: own_folder("archives"))
    """Folder of this machine for archives that are fetched; they stay there."""
    allowed_urls: Annotated[tuple[Pattern, ...], Split] = ()
    """Regular expressions; the management API fetches only archives whose URL one of them matches
    whole."""
    state_dir: Place = Field(default_factory=default_state_dir)
    """Folder of pid file, keys, logs and saved state; one server each."""
    host: str = "127.0.0.1"
    """Address of all three APIs."""
    allowed_hosts: Annotated[tuple[Host, ...], Split] = ()
    """Further names by which requests may call the server, and whose web pages may; * for any."""
    allowed_origins: Annotated[tuple[Origin, ...], Split] = ()
    """Web pages of elsewhere that may call and read the answers (CORS): scheme, host and port; *
    for any."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port of the inference API; 0 lets the system choose, for the other two as well."""
    management_port: int = Field(default=8081, ge=0, le=65535)
    metrics_port: int = Field(default=8082, ge=0, le=65535)
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of gRPC, which needs the extra grpc; not set, there is none. Triton's is 8001."""
    tls_cert: Place | None = None
    """Certificate of all three APIs, and those that lead to its root (PEM); read again when it
    changes."""
    tls_key: Place | None = None
    """Its private key (PEM, without a password)."""
    auth: Literal["auto", "always", "management", "never"] = "auto"
    """Bearer tokens. auto: management always, inference unless the address is loopback, or tokens
    that stay are named; management: that API only, behind a gateway that lets clients in."""
    tokens: Annotated[tuple[str, ...], BeforeValidator(_lines)] = ()
    """Tokens that stay: NAME RIGHTS sha256:HASH, as `modelyard token new` prints them."""
    token_file: Place | None = None
    """File of such lines; it is read again when it changes."""
    insecure: bool = False
    """Allow auth: never where other machines reach the server."""
    allow_load: bool = False
    """Let operators load and unload models by name with the inference API, /v2/repository."""
    shared_memory: bool = False
    """Let clients of this machine have tensors read from and written to files of /dev/shm."""
    invocations: str | None = None
    """Model that `POST /invocations` asks, in MLflow's scoring protocol."""
    device: Annotated[str, _form(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")] = "auto"
    """Device that models run on; auto takes CUDA where there is one and the artifact can use it."""
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """Workers of each model, of all servers; 0 chooses by cores and number of models."""
    max_loaded_models: int = Field(default=0, ge=0)
    """Models that have workers at once, of all servers; each is loaded by its first request, in
    place of the one that was used longest ago. 0 loads every model at the start."""
    worker_poll_us: int = Field(default=300, ge=0, le=10_000)
    """How long an idle worker looks for requests before it sleeps, while they come that often."""
    nvtx: bool = False
    """Have workers mark what they do for Nsight Systems; on CUDA only."""
    servers: int = Field(default=1, ge=1, le=64)
    """Server processes behind the one inference port, which share workers and cores in equal parts;
    more than one where one event loop is the limit, on Linux."""
    fork_workers: bool = True
    """Fork workers from a process that has imported torch; false starts each by itself."""
    queue_size: int = Field(default=100, ge=1)
    """Requests that may wait per model version and kind."""
    priority_shares: Annotated[tuple[Share, Share, Share], Split] = (16, 4, 1)
    """Rows of requests of high, normal and low priority that are taken in turn while all wait."""
    request_timeout_s: float = Field(default=60, gt=0)
    """Time from arrival to answer; a request that takes longer is answered 504."""
    response_timeout_s: float = Field(default=120, gt=0)
    """Time for one batch in a worker; a worker that takes longer is replaced."""
    startup_timeout_s: float = Field(default=120, gt=0)
    """Time for a worker to load its model and answer the golden requests."""
    drain_delay_s: float = Field(default=0, ge=0)
    """Time after SIGTERM for which the server is not ready, but takes new requests."""
    drain_timeout_s: float = Field(default=30, ge=0)
    """Time after SIGTERM for requests that were accepted."""
    max_request_bytes: int = Field(default=6_553_500, ge=1)
    """Size of a request body; a larger one is answered 413."""
    request_memory_bytes: int = Field(default=1 << 30, ge=1)
    """Size of all bodies that the server process holds; one that adds to it is answered 503."""
    max_response_bytes: int = Field(default=128 << 20, ge=1)
    """Size of an answer, or of a chunk of it; a larger one is answered 500."""
    response_memory_bytes: int = Field(default=256 << 20, ge=1)
    """Size of all answers that the server process holds; beyond it workers wait for clients."""
    answer_cache_bytes: int = Field(default=64 << 20, ge=0)
    """Size of all answers that are kept, of models whose settings say `cacheAnswers`."""
    max_image_pixels: int = Field(default=25_000_000, ge=1)
    """Pixels of a picture in a request; built-in handlers answer a larger one 400."""
    max_header_bytes: int = Field(default=65_536, ge=8192)
    """Size of a request's line and headers; a larger head is answered 431."""
    max_connections: int = Field(default=4096, ge=8)
    """Connections of the inference API. One more closes those that have been idle longest, else it
    waits."""
    head_timeout_s: float = Field(default=10, gt=0)
    """Time for a request's head, from its first byte, and for a TLS handshake; then 408."""
    transfer_timeout_s: float = Field(default=20, gt=0)
    """A body that comes, or an answer that is taken, at under 500 bytes/s for so long is ended."""
    keep_alive_s: float = Field(default=75, gt=0)
    """A connection without a request for this long is closed; more than a balancer's own time."""
    explain_share: float = Field(default=0, ge=0, le=1)
    """Share of the predictions of archives with a reference that are explained unasked."""
    tracing: bool = False
    """Export spans of sampled requests, as OpenTelemetry's variables say; needs the extra otel."""
    incidents: int = Field(default=0, ge=0, le=1_000_000)
    """Answers of which the server remembers how they came about, for `modelyard incident`."""
    incident_bytes: int = Field(default=64 << 20, ge=65_536)
    """Size of all that is remembered; the oldest goes."""
    incident_inputs: bool = False
    """Remember requests, their headers and answers themselves too, not only their digests."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what is written of the server's own log."""
    log_format: Literal["text", "json"] = "text"
    """Form of the server's log and the access log: lines for people, or an object each."""
    access_log: bool = False
    """Write a line for each request."""
    log_bytes: int = Field(default=10 << 20, ge=4096)
    """Size of the server's log and of each worker's; a full one is put aside as FILE.1."""
    log_keep: int = Field(default=3, ge=1)
    """Files put aside of each log; the oldest goes."""
    alert_url: (
        Annotated[str, _form(_ALERTS, "an address, as in https://alerts.example/hook")] | None
    ) = None
    """Address that gets a POST of JSON for events of the kinds below."""
    alert_events: Words = ("restart-storm", "refusals", "returned", "failed")
    """Kinds of events that are sent."""
    alert_key_file: Place | None = None
    """File of a key; alerts carry an HMAC-SHA256 of their body by it."""
    trusted_keys: Place | None = None
    """File of public keys (PEM), whose signatures are accepted."""
    require_signature: bool = False
    """Serve only archives that one of the trusted keys signed."""
    require_proven: bool = False
    """Serve only archives whose artifacts were proven on the versions that are here."""
    accept_changed: bool = False
    """Restore archives that have changed in the model store since they were served."""
    install_requirements: bool = False
    """Install what an archive requires, into an environment of its own."""
    sandbox: bool = True
    """Walls around workers; false lets an archive do what the server may."""
    require_sandbox: bool = False
    """Refuse to start where a wall is lacking."""
    network: Literal["auto", "none", "all"] = "auto"
    """Sockets of workers. auto: none, but all for archives that we did not seal."""
    files: Literal["own", "all"] = "own"
    """What workers reach: their archive and a folder of their own; or what the server does."""
    read_paths: Places = ()
    """Files and folders that workers may read too."""
    write_paths: Places = ()
    """Files and folders that workers may read and write too."""
    pass_variables: Words = ()
    """Names, and patterns of names, of more environment variables that workers get."""
    worker_uids: Annotated[str, _form(r"(\d{1,10}-\d{1,10})?", UIDS), AfterValidator(_users)] = (
        "60706-61183"
    )
    """Users of workers, one per model version, where the server is root; empty keeps root."""
    reload: Annotated[tuple[Annotated[Place, AfterValidator(_folder)], ...], Split] = ()
    """Folders whose files stand for those of the same names in archives, as soon as they change."""
    model_settings: Annotated[dict[str, dict[str, Any]], BeforeValidator(_yaml)] = {}
    """Model name → keys of model-config.yaml that go before the archive's own. Handlers do not see
    them."""

    @field_validator("management_port", "metrics_port", "grpc_port")
    @classmethod
    def _is_no_others(cls, value: int | None, info: ValidationInfo) -> int | None:
        for other in ("port", "management_port", "metrics_port"):
            if value and info.data.get(other) == value:
                raise ValueError(
                    f"{value} is {other}, too; each API needs a port of its own, and 0 lets the "
                    "system choose"
                )
        return value

    @field_validator(*dict.fromkeys(name for name, _, _ in CONFLICTS))
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what does not go with the settings above it."""
        for name, is_wrong, text in CONFLICTS:
            if name == info.field_name and is_wrong(value, info.data):
                raise ValueError(text.format(**info.data))
        return value

    @property
    def uids(self) -> range:
        """The users of workers."""
        first, _, last = self.worker_uids.partition("-")
        return range(int(first), int(last) + 1) if first else range(0)

    def network_of(self, is_sealed: bool) -> str:
        """Return the sockets of an archive's workers, none or all; whether we sealed it counts."""
        if self.network != "auto":
            return self.network
        return "none" if is_sealed else "all"

    @property
    def addresses(self) -> tuple[Address, Address, Address]:
        """Where the inference, the management and the metrics API listen."""
        is_tls = self.tls_cert is not None
        return (
            Address(self.host, self.port, None, is_tls, "--port"),
            Address(self.host, self.management_port, None, is_tls, "--management-port"),
            Address(self.host, self.metrics_port, None, is_tls, "--metrics-port"),
        )

    @property
    def quota_place(self) -> tuple[Path, int]:
        """Folder of what tokens have used of their quotas, and this server's number in it."""
        return self.state_dir / "quotas", 0

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the inference API."""
        return self.addresses[0].is_loopback

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the inference and metrics APIs need one; the management API does but for never.

        Who names tokens that stay wants them asked for, on loopback too.
        """
        if self.auth == "auto":
            return not self.is_loopback or bool(self.tokens or self.token_file)
        return self.auth == "always"

    @property
    def warnings(self) -> list[str]:
        """What whoever starts the server should know of these settings."""
        if self.auth != "never":
            return []
        is_here = self.is_loopback and not self.insecure
        who = "every user of this machine" if is_here else "everybody who reaches it"
        return [f"auth is never: {who} can use, replace and remove the models"]

    @property
    def who_is_let_in(self) -> str:
        """What the APIs are open to, and the setting that closes them, in a sentence."""
        if self.asks_for_tokens:
            return "every API asks for a token, but for health checks"
        is_never = self.auth == "never"
        by = "whoever reaches the server"
        if not self.insecure if is_never else self.auth == "auto":
            by = f"this machine, but for requests with {PROXY_HEADERS}"
        rest = "" if is_never else "; management asks for a token"
        what = "all APIs" if is_never else "predictions and metrics"
        return f"{what} are open to {by}{rest}; auth: always asks everybody for a token"


def load_settings(
    command_line: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Merge the sources; a None on the command line leaves a setting to the others.

    Args:
        defaults: defaults of a command, for settings that no source says.

    Raises:
        WrongUsage: a value or name is wrong; the message names each field.
        StartError: the file cannot be read.
    """
    said: dict[str, Any] = dict(_read_file(file)) if file else {}
    said_in = {name: f"{name} in {file}" for name in said}
    merged = {**defaults, **said}
    for field in Settings.model_fields:
        variable = ENV_PREFIX + field.upper()
        if (value := environment.get(variable)) is not None:
            merged[field], said_in[field] = value, variable
    for name, value in command_line.items():
        if value is not None:
            merged[name], said_in[name] = value, f"--{name.replace('_', '-')}"
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise WrongUsage(f"wrong settings: {describe_problems(error, said_in)}") from error


def describe_problems(error: ValidationError, said_in: Mapping[str, str] | None = None) -> str:
    """Return each setting that is wrong, why, and its value.

    Args:
        said_in: where a setting was said, for those that a user may not know by their names.
    """
    found = []
    for problem in error.errors():
        name, *place = map(str, problem["loc"])
        text = what_is_wrong(problem)
        if problem["type"] == "extra_forbidden" and not place:
            text = f"there is no such setting{did_you_mean(name, Settings.model_fields)}"
        found.append(f"{'.'.join([(said_in or {}).get(name, name), *place])}: {text}")
    return "; ".join(found)


_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "dict": "entries of `name: value`",
    "tuple": "a list",
}
"""Words for a problem, by the beginning of its type."""


def what_is_wrong(problem: Mapping[str, Any]) -> str:
    """Return what pydantic found, in our words: what was expected, and the value that came."""
    kind, said, given = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "missing":
        return "it is missing; give it"
    if kind == "value_error":
        reason = str(said["error"])  # our own sentence, which names what it saw
        if " is not one of " in reason:  # typer's, of a choice
            choices = re.findall("'([^']+)'", reason)[1:]
            return reason.rstrip(".") + did_you_mean(str(given), choices)
        return f"{reason}, got {given!r}" if reason.startswith("expected") else reason
    near = ""
    if kind == "literal_error":
        expected = str(said["expected"]).replace("'", "")
        near = did_you_mean(str(given), re.split(r", | or ", expected))
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal"):
        bounds = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less"}
        expected = next(text.format(f"{said[at]:g}") for at, text in bounds.items() if at in said)
    else:
        expected = _EXPECTED.get(kind.split("_")[0], problem["msg"])
    return f"expected {expected}, got {given!r}{near}"


OTHER_VARIABLES = {"CA", "PEERS", "SIGNING_KEY", "TOKEN"}
"""Behind the prefix: what else of ours is read."""


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that looks like a setting and is not one."""
    ours = (name.removeprefix(ENV_PREFIX) for name in environment if name.startswith(ENV_PREFIX))
    settings = {name.upper() for name in Settings.model_fields}
    return [
        f"the variable {ENV_PREFIX}{name} is not a setting and has no effect"
        f"{did_you_mean(name, settings, ENV_PREFIX)}"
        for name in sorted({*ours} - settings - OTHER_VARIABLES)
    ]


def _read_file(file: Path) -> dict[str, Any]:
    problem: object
    try:
        content = parse_yaml(file.read_bytes()) or {}
    except OSError as error:
        problem = error.strerror
    except ValueError as error:
        problem = error
    else:
        if isinstance(content, dict):
            return {str(name): value for name, value in content.items()}
        problem = "it holds no `name: value` lines"
    raise StartError(f"cannot read the configuration file {file}: {problem}")
