"""What Triton's tools read of models and server: configuration, statistics, settings.

Messages are as protobuf's JSON has them, by the names of Triton's model_config.proto and
grpc_service.proto. What is not measured here is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import PREDICT
from modelyard.serve.dataplane.metrics import Histogram
from modelyard.serve.errors import BadRequest, Forbidden
from modelyard.serve.front.begin import Front, Headers, find_model
from modelyard.serve.front.models import describe_signature
from modelyard.serve.settings import Settings

Message = dict[str, Any]
LEVELS = ("error", "warning", "info", "debug")


class Descriptions:
    """Answers what describes."""

    def __init__(self, front: Front, settings: Settings) -> None:
        self._front = front
        self._settings = settings

    def calls(self) -> Mapping[str, Any]:
        """Return the answers by the names of their calls."""
        return {
            "ModelConfig": self._configuration,
            "ModelStatistics": self._statistics,
            "TraceSetting": self._traces,
            "LogSettings": self._logs,
        }

    def _find(self, fields: Mapping[str, Any]) -> ModelVersion:
        front, version = self._front, fields.get("version") or None
        return find_model(front.registry, front.state, fields["name"], version)

    def _configuration(self, fields: Mapping[str, Any], headers: Headers) -> Message:
        model = self._find(fields)
        return {"config": configuration(model, describe_signature(self._front.registry, model))}

    def _statistics(self, fields: Mapping[str, Any], headers: Headers) -> Message:
        if self._settings.servers > 1:
            raise BadRequest(
                f"this is one of {self._settings.servers} servers, whose statistics would be a "
                "part of the whole; GET /metrics of the metrics API has that of all"
            )
        registry = self._front.registry
        if not fields.get("name"):
            models = list(registry)
        elif fields.get("version"):
            models = [self._find(fields)]
        else:
            models = registry.versions(fields["name"])
        return {"model_stats": [statistics(model) for model in models]}

    def _traces(self, fields: Mapping[str, Any], headers: Headers) -> Message:
        if fields.get("model_name"):
            self._find({"name": fields["model_name"]})
        _refuse_changes(fields, "traces are chosen by the setting `tracing`")
        is_on = self._settings.tracing
        found = {"trace_level": ["TIMESTAMPS" if is_on else "OFF"], "trace_mode": ["opentelemetry"]}
        return {"settings": {name: {"value": value} for name, value in found.items()}}

    def _logs(self, fields: Mapping[str, Any], headers: Headers) -> Message:
        _refuse_changes(fields, "logs are chosen by the settings `log_level` and `log_format`")
        level = LEVELS.index(self._settings.log_level)
        found: Message = {
            f"log_{name}": {"bool_param": level >= at} for at, name in enumerate(LEVELS[:3])
        }
        found["log_verbose_level"] = {"uint32_param": int(level == LEVELS.index("debug"))}
        found["log_format"] = {"string_param": self._settings.log_format}
        return {"settings": found}


def _refuse_changes(fields: Mapping[str, Any], how: str) -> None:
    if changes := fields.get("settings"):
        names = ", ".join(list(changes)[:10])[:200]
        raise Forbidden(f"{names} cannot be changed while the server runs: {how}")


def configuration(model: ModelVersion, about: Mapping[str, Any]) -> Message:
    """Return a version's configuration.

    As in Triton, `dims` have no batch where `max_batch_size` is not 0: where the first size of
    every tensor varies.

    Args:
        about: its metadata.
    """
    tensors = (*about["inputs"], *about["outputs"])
    batches = bool(tensors) and all(each["shape"][:1] == [-1] for each in tensors)
    config = model.config
    found: Message = {
        "name": model.name,
        "platform": about["platform"],
        "backend": "pytorch",
        "max_batch_size": config.batch_size if batches else 0,
        "input": [_tensor(each, batches) for each in about["inputs"]],
        "output": [_tensor(each, batches) for each in about["outputs"]],
        "instance_group": [
            {
                "name": model.name,
                "kind": "KIND_GPU" if config.uses_gpu else "KIND_CPU",
                "count": len(model.pool.slots),
            }
        ],
        "response_cache": {"enable": model.answers is not None},
    }
    if batches:
        delay_us = config.batch_delay_ms * 1000
        found["dynamic_batching"] = {
            "preferred_batch_size": [config.batch_size], "max_queue_delay_microseconds": delay_us,
        }  # fmt: skip
    return found


def _tensor(about: Mapping[str, Any], batches: bool) -> Message:
    datatype = about["datatype"]
    return {
        "name": about["name"],
        "data_type": f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}",
        "dims": about["shape"][1:] if batches else about["shape"],
    }


def statistics(model: ModelVersion) -> Message:
    """Return a version's counts and times of predictions.

    What is executed is a call of the handler, with the rows of its batch.
    """
    meters = model.metrics.kinds[PREDICT]
    by_code = meters.by_code()
    failed = sum(count for code, count in by_code.items() if code >= 400)
    none = {"count": 0, "ns": 0}
    return {
        "name": model.name,
        "version": model.version,
        "inference_count": int(meters.batch_size.total),
        "execution_count": sum(meters.batch_size.counts),
        "inference_stats": {
            "success": {
                "count": sum(by_code.values()) - failed,
                "ns": _ns(meters.latency.total - meters.failed_s),
            },
            "fail": {"count": failed, "ns": _ns(meters.failed_s)},
            "queue": _duration(meters.queue_time),
            **_computed(_duration(meters.handler)),
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {"batch_size": rows, **_computed({"count": int(count), "ns": _ns(seconds)})}
            for rows, (count, seconds) in sorted(meters.batches.items())
        ],
    }


def _computed(whole: Message) -> Message:
    """Return the three parts of a handler's time, which is not taken apart: all is in the second.

    perf_analyzer ends where their counts differ.
    """
    part = {**whole, "ns": 0}
    return {"compute_input": part, "compute_infer": whole, "compute_output": part}


def _duration(times: Histogram) -> Message:
    return {"count": sum(times.counts), "ns": _ns(times.total)}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
