"""A filter of system calls: a classic BPF program that the kernel runs before each of them.

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import platform
import struct
import tomllib
from collections.abc import Iterable
from pathlib import Path

from modelyard.serve.walls.kernel import syscall

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → column of the tables, and the kernel's name for it."""

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_DENIED, _WATCHING = _TABLES["denied"], _TABLES["watching"]
_METADATA, _OF_ITSELF, _WITH = (_TABLES[name] for name in ("metadata", "of_itself", "with"))
_IOCTL = 16, 29
_OF_FILE_SYSTEMS = (0x66, 0x58, 0x76, 0x94)
"""Groups of ioctl that do the same, and more: flags, projects, verity, snapshots. Refused as where
a file system has none."""
_CLONE, _CLONE3, _SOCKET, _CONNECT = (56, 220), (435, 435), (41, 198), (42, 203)
_NAMESPACES = 0x7E020000
"""Flags of clone that make one."""
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _SOCK_RAW, _SOCK_SEQPACKET, _SOCK_PACKET, _TYPE = 1, 3, 5, 10, 0xF

_NEWEST = 469
"""The last call of Linux 6.18, which the tables were made with: later ones, and those of x32, are
as absent."""
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_SECCOMP, _SOCKETPAIR = (317, 277), (53, 199)
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4

Program = list[bytes]


def is_supported() -> bool:
    """Return whether this kernel takes a filter, for an architecture that is known here."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    column, _ = _ARCHITECTURES[platform.machine()]
    try:
        syscall(_SECCOMP[column], _SET_MODE_FILTER, 0, None)
    except OSError as error:
        return error.errno == errno.EFAULT  # only the filter itself was missing
    return False


def restrict(has_network: bool, has_metadata: bool = False) -> None:
    """Refuse, from now on, what no handler needs and what reaches other processes.

    Refused calls fail with EPERM. The thread that calls this must be the only one. no_new_privs
    must be set.

    Args:
        has_network: whether sockets may be connected; else there are but socket pairs, and what
            CUDA listens on.
        has_metadata: whether modes, owners and times of files may be changed: what is not the
            process's own refuses that by itself, or its files are left as they are.

    Raises:
        OSError: the kernel takes no filter.
    """
    code = b"".join(_program(platform.machine(), has_network, has_metadata, os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
    column, _ = _ARCHITECTURES[platform.machine()]
    # Old kernels else slow a process with a filter down, against a fault of processors.
    syscall(_SECCOMP[column], _SET_MODE_FILTER, _SPEC_ALLOW, header)


def _program(machine: str, has_network: bool, has_metadata: bool, pid: int) -> Program:
    """Return the filter; what no part of it answers is allowed."""
    column, architecture = _ARCHITECTURES[machine]
    program = [
        _load(_ARCHITECTURE_AT),
        _instruction(_IF_EQUAL, architecture, 1, 0),  # passes over what follows
        _refuse(),
        _load(_NUMBER_AT),
        *_if(_IF_AT_LEAST, _NEWEST + 1, [_refuse(errno.ENOSYS)]),
    ]
    for numbers in (*_DENIED.values(), *_WATCHING.values()):
        program += _if(_IF_EQUAL, numbers[column], [_refuse()]) if numbers[column] >= 0 else []
    if not has_metadata:
        for numbers in _METADATA.values():
            program += _if(_IF_EQUAL, numbers[column], [_refuse(0)]) if numbers[column] >= 0 else []
        groups = _among((each << 8 for each in _OF_FILE_SYSTEMS), [_refuse(errno.ENOTTY)])
        group = [_load_argument(1), _instruction(_AND, 0xFF00)]
        program += _if(_IF_EQUAL, _IOCTL[column], [*group, *groups, _allow()])
    for *columns, conditions in _WITH.values():
        then = [_refuse()]
        for argument, value in reversed(conditions):
            then = [_load_argument(argument), *_if(_IF_EQUAL, value, then)]
        program += _if(_IF_EQUAL, columns[column], [*then, _load(_NUMBER_AT)])
    # Its flags lie in memory, where no filter looks; libraries then take `clone`.
    program += _if(_IF_EQUAL, _CLONE3[column], [_refuse(errno.ENOSYS)])
    program += _if(
        _IF_EQUAL,
        _CLONE[column],
        [_load_argument(0), *_if(_IF_ANY_BIT, _NAMESPACES, [_refuse()]), _allow()],
    )
    if not has_network:  # CUDA then takes a server that several processes share for absent
        program += _if(_IF_EQUAL, _CONNECT[column], [_refuse(errno.ECONNREFUSED)])
        # One of a pair for datagrams sends to any address.
        program += _if(_IF_EQUAL, _SOCKETPAIR[column], _unix(_SOCK_STREAM, _SOCK_SEQPACKET))
    # CUDA listens on a socket of packets, which reaches nobody unless it is connected.
    sockets = _sockets() if has_network else _unix(_SOCK_SEQPACKET)
    program += _if(_IF_EQUAL, _SOCKET[column], sockets)
    for *columns, argument, number in _OF_ITSELF.values():
        test = [_load_argument(argument), *_among((0, pid), [_allow()]), _refuse(number)]
        program += _if(_IF_EQUAL, columns[column], test)
    return [*program, _allow()]


def _sockets() -> Program:
    """Return what allows Unix sockets, IP, and questions to the kernel about its addresses."""
    common = [
        _load_argument(1),
        _instruction(_AND, _TYPE),
        *_among((_SOCK_RAW, _SOCK_PACKET), [_refuse()]),
        _allow(),
    ]
    routes = [_load_argument(2), *_if(_IF_EQUAL, 0, [_allow()]), _refuse()]
    return [
        _load_argument(0),
        *_if(_IF_EQUAL, _AF_NETLINK, routes),
        *_among((_AF_UNIX, _AF_INET, _AF_INET6), common),
        _refuse(),
    ]


def _unix(*kinds: int) -> Program:
    """Return what allows Unix sockets of these types alone."""
    types = [_load_argument(1), _instruction(_AND, _TYPE), *_among(kinds, [_allow()])]
    return [_load_argument(0), *_if(_IF_EQUAL, _AF_UNIX, types), _refuse()]


def _if(test: int, value: int, then: Program) -> Program:
    return [_instruction(test, value, 0, len(then)), *then]


def _among(values: Iterable[int], then: Program) -> Program:
    return [each for value in values for each in _if(_IF_EQUAL, value, then)]


def _load(at: int) -> bytes:
    return _instruction(_LOAD, at)


def _load_argument(number: int) -> bytes:
    """Return what loads the lower half of an argument: what is asked of it here fits in it."""
    return _load(_ARGUMENTS_AT + 8 * number)


def _refuse(number: int = errno.EPERM) -> bytes:
    return _instruction(_RETURN, 0x00050000 | number)


def _allow() -> bytes:
    return _instruction(_RETURN, 0x7FFF0000)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
