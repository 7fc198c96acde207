"""A filter of system calls: a classic BPF program that the kernel runs before each of them.

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

from modelyard.serve.walls.kernel import syscall

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → column of the tables below, and the kernel's name for it."""

_DENIED = {
    # Memory, registers and descriptors of other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # File systems and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # The kernel's keys, modules, log, and the parts of it that bugs were found in.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Memory, semaphores and queues that everybody of a user shares. POSIX has its own, in /dev/shm.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
"""Name → number on each architecture."""
_WATCHING = {"inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)}
"""What names files that others make, whatever rights there are on them: refused, too."""
_METADATA = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""What changes a file by its path, which Landlock does not see, or by a descriptor, which may be
one for reading: done without effect. Libraries copy modes and times with every file, and fail
where that does."""
_IOCTL, _FCNTL = (16, 29), (72, 25)
_OF_FILE_SYSTEMS = (0x66, 0x58, 0x76, 0x94)
"""Groups of ioctl that do the same, and more: flags, projects, verity, snapshots. Refused as where
a file system has none."""
_LEASES = (1024, 1026)
"""F_SETLEASE and F_NOTIFY of fcntl: others wait at a lease."""
_AFFINITY = (203, 122)
"""sched_setaffinity of the caller; of any other without effect, since libraries pin threads."""
_OF_ITSELF = {
    "prlimit64": (302, 261, 0),
    "sched_setparam": (142, 118, 0),
    "sched_setscheduler": (144, 119, 0),
    "sched_setattr": (314, 274, 0),
    "setpriority": (141, 140, 1),
    "ioprio_set": (251, 30, 1),
}
"""Name → numbers, and which argument names the process: allowed where it is the caller."""
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NAMESPACES = 0x7E020000
"""Flags of clone that make one."""
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_RAW, _SOCK_PACKET, _TYPE = 3, 10, 0xF
_OF_THE_USER = {"setpriority": 2, "ioprio_set": 3}
"""Value of the first argument with which the second one names a user."""

_X32 = 0x40000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_SECCOMP = (317, 277)
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
        has_network: whether sockets may be made; else there are but socket pairs.
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
        *_unless(_IF_EQUAL, architecture, [_refuse()]),
        _load(_NUMBER_AT),
        *_if(_IF_AT_LEAST, _X32, [_refuse()]),
    ]
    for numbers in (*_DENIED.values(), *_WATCHING.values()):
        program += _if(_IF_EQUAL, numbers[column], [_refuse()]) if numbers[column] >= 0 else []
    if not has_metadata:
        for numbers in _METADATA.values():
            program += _if(_IF_EQUAL, numbers[column], [_refuse(0)]) if numbers[column] >= 0 else []
        groups = _among((each << 8 for each in _OF_FILE_SYSTEMS), [_refuse(errno.ENOTTY)])
        group = [_load_argument(1), _instruction(_AND, 0xFF00)]
        program += _if(_IF_EQUAL, _IOCTL[column], [*group, *groups, _allow()])
    leases = [_load_argument(1), *_among(_LEASES, [_refuse()]), _allow()]
    program += _if(_IF_EQUAL, _FCNTL[column], leases)
    others = [_load_argument(0), *_among((0, pid), [_allow()]), _refuse(0)]
    program += _if(_IF_EQUAL, _AFFINITY[column], others)
    # Its flags lie in memory, where no filter looks; libraries then take `clone`.
    program += _if(_IF_EQUAL, _CLONE3[column], [_refuse(errno.ENOSYS)])
    program += _if(
        _IF_EQUAL,
        _CLONE[column],
        [_load_argument(0), *_if(_IF_ANY_BIT, _NAMESPACES, [_refuse()]), _allow()],
    )
    program += _if(_IF_EQUAL, _SOCKET[column], _sockets() if has_network else [_refuse()])
    for name, (*columns, argument) in _OF_ITSELF.items():
        test: Program = []
        if name in _OF_THE_USER:
            test += [_load_argument(0), *_if(_IF_EQUAL, _OF_THE_USER[name], [_refuse()])]
        test += [_load_argument(argument), *_among((0, pid), [_allow()]), _refuse()]
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


def _if(test: int, value: int, then: Program) -> Program:
    return [_instruction(test, value, 0, len(then)), *then]


def _unless(test: int, value: int, then: Program) -> Program:
    return [_instruction(test, value, len(then), 0), *then]


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
