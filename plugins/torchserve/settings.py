"""Settings of TorchServe's dialect alone. Names are those of its config.properties."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from modelyard.serve.settings import PROXY_HEADERS, Address

GRPC_APIS = ("inference", "management")


class TorchServeSettings(BaseModel):
    """Settings of the dialect, beside those of every server; frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    directory: Path
    """Folder in which the command was given: key_file.json is written here."""
    config_file: Path | None = None
    inference_address: Address = Address(port=8080)
    management_address: Address = Address(port=8081)
    metrics_address: Address = Address(port=8082)
    """Equal addresses share one listener."""
    grpc_inference_address: str = "127.0.0.1"
    """Further host for gRPC; the addresses above speak it, too."""
    grpc_inference_port: int = Field(default=7070, ge=0, le=65535)
    grpc_inference_max_connection_age_ms: int | None = None
    """Age at which clients are told to open another connection; then the calls that they have end
    within the grace."""
    grpc_inference_max_connection_age_grace_ms: int | None = None
    grpc_management_address: str = "127.0.0.1"
    grpc_management_port: int = Field(default=7071, ge=0, le=65535)
    grpc_management_max_connection_age_ms: int | None = None
    grpc_management_max_connection_age_grace_ms: int | None = None
    enable_grpc_ssl: bool = False
    """TLS on the two ports of gRPC."""
    certificate_file: Path | None = None
    """PEM, of every address that starts with https."""
    private_key_file: Path | None = None
    keystore: Path | None = None
    """PKCS12; certificate and key in one file."""
    keystore_pass: str = "changeit"
    """Password of the keystore. Without files of either kind the server makes a certificate that it
    signs itself."""
    enable_model_api: bool = False
    """Whether models may be registered and unregistered while serving."""
    strict_start: bool = False
    """Not TorchServe's: whether a start is as of our own server, see `Policy.is_strict`."""
    disable_token_authorization: bool | None = None
    """True: no tokens; False: everywhere; None, not said: inference open on loopback only."""
    token_expiration_min: float = Field(default=60, gt=0)
    default_workers_per_model: int = Field(default=0, ge=0)
    """0: by GPUs, else cores at the start, and none over the register API."""
    default_service_handler: str | None = None
    number_of_gpu: int | None = Field(default=None, ge=0)
    """Use no more GPUs than this; None uses all."""
    service_envelope: Literal["body", "json", "kserve", "kservev2"] | None = None
    allowed_urls: tuple[str, ...] = ()
    """Regular expressions; a URL is fetched only when one matches it whole. Empty: none is."""
    models: dict[str, dict[str, dict[str, Any]]] = {}
    """name → version → defaults of the models that are loaded by other means (JSON)."""
    model_snapshot: dict[str, Any] | None = None
    """What to load (JSON); KServe configures TorchServe by it."""
    snapshot_dir: Path | None = None
    """Folder that a snapshot is written to after each change; None writes none."""
    properties: dict[str, str] = {}
    """Every key that was set, as it was written: what a snapshot keeps."""
    decode_input_request: bool = True
    limit_max_image_pixels: bool = True
    batch_delay: Literal["busy", "always"] = "busy"
    """When a request waits for others, up to its model's maxBatchDelay: while every worker is busy;
    or always, as in TorchServe."""
    max_response_size: int = Field(default=6_553_500, ge=0)
    unregister_model_timeout: int = Field(default=120, ge=1)
    blacklist_env_vars: str | None = None
    """Regular expression; variables whose whole name it matches are kept from workers."""
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    ts_open_inference_protocol: str | None = None
    """`oip` adds the routes of the Open Inference Protocol."""
    ts_header_key_sequence_id: str = "ts_request_sequence_id"
    ts_header_key_sequence_start: str = "ts_request_sequence_start"
    ts_header_key_sequence_end: str = "ts_request_sequence_end"
    enable_metrics_api: bool = True
    metrics_mode: Literal["log", "prometheus", "legacy"] = "log"
    metrics_config: Path | None = None
    model_metrics_auto_detect: bool = False
    metric_time_interval: int = Field(default=60, ge=1)
    disable_system_metrics: bool = False
    log_dir: Path = Path("logs")
    metrics_dir: Path = Path("logs")

    @property
    def is_open(self) -> bool:
        """Whether predictions of this machine need no token, and those of others do."""
        return self.disable_token_authorization is None and self.inference_address.is_loopback

    @property
    def who_is_let_in(self) -> str:
        """What the APIs are open to, in a sentence."""
        if self.disable_token_authorization:
            return "no token is asked for (disable_token_authorization): every API is open"
        file = self.directory / "key_file.json"
        if not self.is_open:
            return f"predictions and management need a token of {file}"
        here = "predictions of this machine need no token; management, and requests with"
        all = "disable_token_authorization=false asks everybody, also behind a silent proxy"
        return f"{here} {PROXY_HEADERS}, need one of {file}; {all}"

    @property
    def has_oip(self) -> bool:
        """Whether the Open Inference Protocol is on: `oip` by environment, `true` by file."""
        return (self.ts_open_inference_protocol or "").lower() in ("oip", "true")

    @property
    def has_tensors(self) -> bool:
        """Whether its requests are read as tensors: other envelopes read bodies themselves."""
        return self.has_oip and self.service_envelope in (None, "kserve")

    @property
    def grpc_addresses(self) -> Sequence[Address]:
        """Where the inference and the management API listen for gRPC alone."""
        named = ((self._of_grpc(api, "address"), self._of_grpc(api, "port")) for api in GRPC_APIS)
        return tuple(
            Address(host.strip("[]"), port, is_tls=self.enable_grpc_ssl) for host, port in named
        )

    @property
    def grpc_ages(self) -> Sequence[tuple[float, float]]:
        """How long a connection to each of them may last, and its grace, in seconds."""
        return tuple((self._age_s(api, "age"), self._age_s(api, "age_grace")) for api in GRPC_APIS)

    def _age_s(self, api: str, of: str) -> float:
        ms: int | None = self._of_grpc(api, f"max_connection_{of}_ms")
        return inf if ms is None else ms / 1000

    def _of_grpc(self, api: str, key: str) -> Any:
        return getattr(self, f"grpc_{api}_{key}")

    @property
    def addresses(self) -> tuple[Address, Address, Address]:
        """Where the inference, the management and the metrics API listen."""
        return self.inference_address, self.management_address, self.metrics_address
