"""The messages of all services, by full name: `message("inference.ModelInferRequest")()`.

`services.binpb` is what `scripts/protos` makes of the .proto files. Read when it is first needed,
into a pool of its own: no generated code that only one version of protobuf takes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

COMPILED = Path(__file__).with_name("services.binpb")


@cache
def files() -> FileDescriptorSet:
    """Return the descriptors of all files, each behind those that it imports."""
    return FileDescriptorSet.FromString(COMPILED.read_bytes())


@cache
def pool() -> DescriptorPool:
    """Return what knows all messages and services."""
    made = DescriptorPool()
    for file in files().file:
        made.Add(file)
    return made


@cache
def message(name: str) -> Any:
    """Return the class of a message.

    Raises:
        KeyError: there is no such message.
    """
    return GetMessageClass(pool().FindMessageTypeByName(name))
