"""System shared memory: tensors that requests name by a place in a file of /dev/shm.

The server reads and writes files by their descriptors and maps nothing: a client may cut a file
short at any time, and a mapping of it would end the server. Workers get the bytes as those of every
request; they have a /dev/shm of their own.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from modelyard.archiver.untrusted.json import parse_json
from modelyard.serve.api.events import LENGTH_HEADER
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.call import Call, MovableSink, Reply, Stream
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import (
    BadRequest,
    BodyTooLarge,
    Conflict,
    Forbidden,
    NoSuchRoute,
    Unavailable,
)
from modelyard.serve.front.begin import Headers
from modelyard.serve.http.tokens import why_checked
from modelyard.serve.settings import Settings

FOLDER = "/dev/shm/"
MOST_REGIONS = 256
LOOKED_AT_BYTES = 1 << 16
"""Bytes of JSON that may name shared memory: it is read where all requests wait. The worker refuses
what is named in longer ones."""
REGION, SIZE, OFFSET = (f"shared_memory_{each}" for each in ("region", "byte_size", "offset"))
_KEY = re.compile(r"/?([^/\0]{1,255})")
_DOTS = (".", "..")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class _File:
    """A descriptor, closed after its last use: a request under way may outlive its region."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Region(NamedTuple):
    """A part of a file that clients call by a name."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: _File


class Place(NamedTuple):
    """A part of a region, where a tensor is or is to be."""

    region: Region
    offset: int
    byte_size: int

    @property
    def start(self) -> int:
        """Where it begins in the file."""
        return self.region.offset + self.offset

    def check(self, size: int) -> None:
        """Raise BadRequest unless the file has so many bytes here still."""
        if (there := os.fstat(self.region.file.number).st_size) < self.start + size:
            raise BadRequest(
                f'the file of shared memory region "{self.region.name}" has {there} bytes by now; '
                f"expected {self.start + size}"
            )

    def read(self) -> bytes:
        """Return what is there."""
        self.check(self.byte_size)
        return os.pread(self.region.file.number, self.byte_size, self.start)

    def write(self, data: Buffer, name: str) -> None:
        """Put a tensor there."""
        size = len(data)
        if size > self.byte_size:
            raise BadRequest(
                f'output "{name}" has {size} bytes; its place in shared memory region '
                f'"{self.region.name}" has {self.byte_size}'
            )
        self.check(size)
        os.pwrite(self.region.file.number, data, self.start)


class Regions:
    """The regions that clients of this machine have registered.

    Args:
        settings: whether there are any, and the limits of bytes.
        budget: counts what is read of them.
    """

    def __init__(self, settings: Settings, budget: AnswerBudget) -> None:
        self._settings = settings
        self._budget = budget
        self._regions: dict[str, Region] = {}

    def calls(self) -> Mapping[str, Callable[[Mapping[str, Any], Headers], dict[str, Any]]]:
        """Return the answers by the names of their calls."""
        return {
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": lambda fields, headers: {"regions": {}},
            "CudaSharedMemoryRegister": _refuse_cuda,
            "CudaSharedMemoryUnregister": lambda fields, headers: {},
        }

    def _status(self, fields: Mapping[str, Any], headers: Headers) -> dict[str, Any]:
        names = [fields["name"]] if fields.get("name") else list(self._regions)
        found = {name: self._find(name)._asdict() for name in names}
        for each in found.values():
            del each["file"]
        return {"regions": found}

    def _find(self, name: Any) -> Region:
        if (region := self._regions.get(name)) is None:
            raise NoSuchRoute(f"there is no shared memory region {str(name)[:100]!r}; register it")
        return region

    def _register(self, fields: Mapping[str, Any], headers: Headers) -> dict[str, Any]:
        if not self._settings.shared_memory:
            raise Forbidden("shared memory is off; the setting shared_memory lets clients use it")
        if (why := why_checked(headers)) not in (b"", b"authorization"):
            raise Forbidden(
                f"shared memory is for clients of this machine, and the header {why.decode()} "
                "says that a proxy sent this"
            )
        name, key = fields.get("name"), fields.get("key")
        offset, size = _number(fields, "offset", 0), _number(fields, "byte_size")
        if not isinstance(name, str) or not 0 < len(name) <= 255:
            raise BadRequest(f"the region's name is {name!r}; expected 1 to 255 characters"[:300])
        if not isinstance(key, str) or not (match := _KEY.fullmatch(key)) or match[1] in _DOTS:
            raise BadRequest(f"key is {str(key)[:100]!r}; expected the name of a file of {FOLDER}")
        if name in self._regions:
            raise Conflict(f"there is a shared memory region {name!r} already; unregister it")
        total = size + sum(each.byte_size for each in self._regions.values())
        most = self._settings.request_memory_bytes
        if len(self._regions) >= MOST_REGIONS or total > most:
            raise BadRequest(
                f"at most {MOST_REGIONS} regions of {most} bytes together (request_memory_bytes) "
                "are taken; unregister some"
            )
        self._regions[name] = Region(name, key, offset, size, _open(match[1], offset + size))
        return {}

    def _unregister(self, fields: Mapping[str, Any], headers: Headers) -> dict[str, Any]:
        for name in [fields["name"]] if fields.get("name") else list(self._regions):
            self._regions.pop(name, None)
        return {}

    # -- requests --------------------------------------------------------------------------------

    def bring(self, call: Call, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return a request with the tensors that it names in shared memory behind its JSON.

        The call's sink is then one that puts the outputs where they are wanted.

        Raises:
            BadRequest, NoSuchRoute: what is named is not there.
            BodyTooLarge, Unavailable: it is more than bodies may be.
        """
        begin = bytearray()
        for part in parts:
            begin += part[: LOOKED_AT_BYTES - len(begin)]
        if REGION.encode() not in begin:
            return parts
        body = b"".join(parts)
        fields = wire.unpack_meta(call.head)
        own, pairs = fields[:3], list(zip(fields[3::2], fields[4::2], strict=True))
        said = {name.lower(): value for name, value in pairs}
        length = said.get(LENGTH_HEADER, b"%d" % len(body))
        if not length.isdigit() or said.get(b"content-encoding", b"identity") != b"identity":
            return parts  # which the worker refuses
        head, tail = body[: int(length)], memoryview(body)[int(length) :]
        if len(head) > LOOKED_AT_BYTES:
            return parts
        try:
            request = parse_json(head)
            wanted = self._outputs(request)
            tensors, size = self._inputs(request, tail)
            head = orjson.dumps(request)
        except (ValueError, TypeError, KeyError, AttributeError):
            return parts
        if sum(map(len, tensors)) > self._settings.max_request_bytes:
            raise BodyTooLarge(self._settings.max_request_bytes)
        self._budget.bodies += size
        call.sink = Placed(call.sink, wanted, self._budget, size)
        if self._budget.bodies > self._budget.body_limit:
            raise Unavailable("the bodies of requests take all of request_memory_bytes")
        kept = [word for pair in pairs if pair[0].lower() != LENGTH_HEADER for word in pair]
        call.head = wire.pack_meta((*own, *kept, LENGTH_HEADER, b"%d" % len(head)))
        return [head, *tensors]

    def _inputs(self, request: dict[str, Any], tail: memoryview) -> tuple[list[Buffer], int]:
        """Return the bytes of all tensors in their order, and how many came from shared memory."""
        tensors: list[Buffer] = []
        at = read = 0
        most = self._settings.max_request_bytes
        for each in request["inputs"]:
            parameters = each.get("parameters") or {}
            if (place := self._place(parameters, f'input "{each["name"]}"')) is not None:
                if each.get("data") is not None or "binary_data_size" in parameters:
                    raise BadRequest(f'input "{each["name"]}" has data, and is in shared memory')
                read += place.byte_size
                if read > most:
                    raise BodyTooLarge(most)
                tensors.append(place.read())
                each["parameters"] = {**_others(parameters), "binary_data_size": place.byte_size}
            elif (size := parameters.get("binary_data_size")) is not None:
                tensors.append(tail[at : at + size])
                at += size
        return [*tensors, tail[at:]], read

    def _outputs(self, request: dict[str, Any]) -> dict[str, Place]:
        """Return where outputs are wanted, which the request then asks for as bytes."""
        wanted = {}
        for each in request.get("outputs") or ():
            parameters = each.get("parameters") or {}
            if (place := self._place(parameters, f'output "{each["name"]}"')) is not None:
                if parameters.get("classification"):
                    raise BadRequest(f'output "{each["name"]}" has classes: not in shared memory')
                wanted[each["name"]] = place
                each["parameters"] = {**_others(parameters), "binary_data": True}
        return wanted

    def _place(self, parameters: Mapping[str, Any], where: str) -> Place | None:
        if (name := parameters.get(REGION)) is None:
            return None
        region = self._find(name)
        offset, size = _number(parameters, OFFSET, 0), _number(parameters, SIZE)
        if offset + size > region.byte_size:
            raise BadRequest(
                f'{where} is at {offset} to {offset + size} of shared memory region "{name}", '
                f"which has {region.byte_size} bytes"
            )
        return Place(region, offset, size)


class Placed:
    """The sink of a call: puts outputs into shared memory, and hands the rest of the reply on."""

    def __init__(
        self, sink: Any, wanted: Mapping[str, Place], budget: AnswerBudget, size: int
    ) -> None:
        self._sink = sink
        self._wanted = wanted
        self._budget = budget
        self._size = size

    def done(self) -> bool:
        """Return whether it has its reply, or nobody waits for it any more."""
        found: bool = self._sink.done()
        return found

    def move(self, call: Call) -> bool:
        """Take the reply to another call, if whoever asked does."""
        return isinstance(self._sink, MovableSink) and self._sink.move(call)

    def set_result(self, reply: Reply, /) -> None:
        """Put the outputs where they are wanted, and hand on what is left."""
        self._end()
        try:
            if self._wanted and reply.status < 400:
                reply = self._put(reply)
        except (BadRequest, OSError) as error:
            self._sink.set_exception(error)
        else:
            self._sink.set_result(reply)

    def set_exception(self, error: Exception, /) -> None:
        """Hand an error on."""
        self._end()
        self._sink.set_exception(error)

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""
        self._end()
        found: bool = self._sink.cancel()
        return found

    def _end(self) -> None:
        size, self._size = self._size, 0
        self._budget.bodies -= size

    def _put(self, reply: Reply) -> Reply:
        if isinstance(reply.body, Stream):
            reply.body.close()
            raise BadRequest("what a handler streams is not put in shared memory; take its bytes")
        fields = wire.unpack_meta(reply.headers)
        headers = dict(zip(fields[::2], fields[1::2], strict=True))
        body = memoryview(reply.body)
        at = int(headers.get(LENGTH_HEADER, len(body)))
        answer, rest = orjson.loads(body[:at]), list[Buffer]()
        for each in answer.get("outputs", ()):
            size = each.get("parameters", {}).get("binary_data_size", 0)
            data, at = body[at : at + size], at + size
            if (place := self._wanted.get(each["name"])) is not None:
                if "data" in each:
                    raise BadRequest(f'output "{each["name"]}" has no bytes to put anywhere')
                place.write(data, each["name"])
                del each["parameters"]  # as Triton, whose clients in C++ expect none
            else:
                rest.append(data)
        head = orjson.dumps(answer)
        headers[LENGTH_HEADER] = b"%d" % len(head)
        packed = wire.pack_meta([word for pair in headers.items() for word in pair])
        return reply._replace(headers=packed, body=b"".join((head, *rest)))


def _others(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in parameters.items() if name not in (REGION, SIZE, OFFSET)}


def _number(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not (default is None) <= value < 1 << 48:
        least = 1 if default is None else 0
        raise BadRequest(f"{name} is {str(value)[:40]!r}; expected a whole number from {least}")
    return value


def _open(name: str, least: int) -> _File:
    """Open a file of our own user's that has so many bytes."""
    try:
        file = _File(os.open(FOLDER + name, _FLAGS))
    except OSError as error:
        raise BadRequest(f"{FOLDER}{name} cannot be opened: {error.strerror}") from error
    about = os.fstat(file.number)
    problem = ""
    if not stat.S_ISREG(about.st_mode):
        problem = "is not a file"
    elif about.st_uid != os.geteuid():
        problem = f"belongs to user {about.st_uid}; expected {os.geteuid()}, the server's"
    elif about.st_size < least:
        problem = f"has {about.st_size} bytes; expected {least}, offset and byte_size together"
    if problem:
        del file  # which the error's frames would keep open
        raise BadRequest(f"{FOLDER}{name} {problem}")
    return file


def _refuse_cuda(fields: Mapping[str, Any], headers: Headers) -> dict[str, Any]:
    raise BadRequest("CUDA shared memory is not supported; use system shared memory, or send bytes")
