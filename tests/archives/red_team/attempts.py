# mypy: ignore-errors
"""The table of what a hostile archive tries: name → group and code.

An attempt gets the `World` that it runs in. It returns what it got; whatever refuses it is an
OSError, and so is a call that was done without effect.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
ATTEMPTS = {}
"""Name → (group, function of the world)."""


def add(group, name, function):
    """Put one into the table."""
    assert name not in ATTEMPTS, name
    ATTEMPTS[name] = (group, function)


def attempt(group, *names):
    """Put one into the table by its function's name, or one for each further name."""

    def put(function):
        name = function.__name__.replace("_", " ")
        if not names:
            add(group, name, function)
        for each in names:
            add(group, f"{name}: {each}", lambda world, each=each: function(world, each))
        return function

    return put


def run(name, world):
    """Return what an attempt got, or how it was refused."""
    try:
        return {"got": ATTEMPTS[name][1](SimpleNamespace(**world))}
    except OSError as error:
        return {"refused": type(error).__name__, "why": error.strerror}


def refuse(why):
    raise PermissionError(errno.EPERM, why)


def check(result):
    """Return what a function of the C library did, or raise why not."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(on_x86, elsewhere, *arguments):
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return check(LIBC.syscall(ctypes.c_long(on_x86 if X86 else elsewhere), *words))


def is_let_through(on_x86, elsewhere, *arguments):
    """Ask with arguments that may mean nothing: whoever is let through gets another error."""
    try:
        result = call(on_x86, elsewhere, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return error.strerror
    if result > 2:
        with contextlib.suppress(OSError):
            os.close(result)
    return "let through"


def changes(look, change):
    """Do it, and refuse what had no effect."""
    before = look()
    change()
    if look() == before:
        refuse("done without effect")
    return "changed"


def in_a_child(does):
    """Return None where it works in a process of its own, which it may change."""
    child = os.fork()
    if not child:
        try:
            does()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    if number := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(number, os.strerror(number))
    return "done"


# -- read --------------------------------------------------------------------------------------

SECRET = {
    "management token": "{state}/keys.json",
    "registered models": "{state}/models.json",
    "the server's ports": "{state}/server.json",
    "the server's log": "{state}/logs/server.log",
    "a file of the state folder": "{state}/victim",
    "another archive": "{store}/echo.mar",
    "another model's code": "{other}/handler.py",
    "another model's temporary file": "{scratch}/victim",
    "a file of a home folder": "{home}/victim",
    "a file of everybody": "{public}/victim",
    "the machine's name": "/etc/hostname",
    "the machine's mounts": "/proc/1/mounts",
    "by /proc/self/root": "/proc/self/root{state}/victim",
    "by /proc/self/cwd": "/proc/self/cwd/../../victim",
    "by ..": "{own}/../../victim",
    "by the server's root": "/proc/{server}/root{state}/victim",
}


@attempt("read", *SECRET)
def read(world, what):
    return Path(SECRET[what].format(**vars(world))).read_bytes()[:64].hex()


@attempt("read", "state", "store", "other", "home", "public")
def list_(world, what):
    return os.listdir(getattr(world, what))


@attempt("read")
def read_by_another_program(world):
    ran = subprocess.run(["cat", f"{world.state}/victim"], capture_output=True, text=True)
    return ran.stdout if ran.returncode == 0 else refuse(ran.stderr.strip())


@attempt("read")
def read_by_a_path_descriptor(world):
    there = os.open(f"{world.state}/victim", os.O_PATH)
    return Path(f"/proc/self/fd/{there}").read_text()


@attempt("read")
def read_by_a_link_of_its_own(world):
    link = Path(world.mine, "link")
    link.unlink(missing_ok=True)
    link.symlink_to(f"{world.state}/victim")
    return link.read_text()


@attempt("read")
def read_by_a_name_of_its_own(world):
    name = Path(world.mine, "name")
    name.unlink(missing_ok=True)
    os.link(f"{world.state}/victim", name)
    return name.read_text()


@attempt("read")
def read_by_a_handle(world):
    handle = ctypes.create_string_buffer(struct.pack("II", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    path = f"{world.state}/victim".encode()
    check(LIBC.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0))
    folder = os.open("/usr", os.O_RDONLY)
    return check(LIBC.open_by_handle_at(folder, handle, os.O_RDONLY))


@attempt("read", "/dev/mem", "/dev/kmsg", "/dev/port")
def read_device(world, device):
    return os.read(os.open(device, os.O_RDONLY | os.O_NONBLOCK), 4096)[:8].hex()


# -- write -------------------------------------------------------------------------------------

TARGETS = ("state", "store", "other", "own", "readable", "home", "public")


@attempt("write", *TARGETS)
def append(world, what):
    with Path(getattr(world, what), "victim").open("a") as file:
        file.write("#")
    return "written"


@attempt("write", *TARGETS)
def make(world, what):
    file = Path(getattr(world, what), f"made-{os.getpid()}")
    file.touch()
    file.unlink()
    return "made"


@attempt("write", "state", "other", "readable")
def cut(world, what):
    file = f"{getattr(world, what)}/victim"
    return changes(lambda: os.stat(file).st_size, lambda: os.truncate(file, 3))


@attempt("write")
def cut_what_it_reads(world):
    file = f"{world.readable}/cut"
    return changes(
        lambda: os.stat(file).st_size, lambda: os.close(os.open(file, os.O_RDONLY | os.O_TRUNC))
    )


@attempt("write", "state", "other")
def move(world, what):
    file = f"{getattr(world, what)}/victim"
    os.rename(file, f"{file}-moved")
    os.rename(f"{file}-moved", file)
    return "moved"


@attempt("write")
def move_to_its_own(world):
    file, name = f"{world.state}/victim", f"{world.mine}/moved"
    os.rename(file, name)
    os.rename(name, file)
    return "moved"


@attempt("write", "state", "other")
def make_folder(world, what):
    folder = Path(getattr(world, what), "folder")
    folder.mkdir()
    folder.rmdir()
    return "made"


@attempt("write", "state", "readable")
def make_link(world, what):
    link = Path(getattr(world, what), "linked")
    link.symlink_to("/")
    link.unlink()
    return "made"


@attempt("write", "state", "readable", "public")
def make_file_without_a_name(world, what):
    return os.open(getattr(world, what), os.O_TMPFILE | os.O_RDWR)


@attempt("write")
def remove(world):
    file = Path(world.state, "removed")
    file.unlink()
    return "removed"


@attempt("write")
def make_compiled_file(world):
    folder = Path(world.readable, "__pycache__")
    folder.mkdir()
    folder.rmdir()
    return "made"


@attempt("write", "character", "block")
def make_device(world, kind):
    mode = {"character": stat.S_IFCHR, "block": stat.S_IFBLK}[kind]
    name = f"{world.mine}/{kind}"
    os.mknod(name, mode | 0o600, os.makedev(1, 0 if kind == "block" else 3))
    os.unlink(name)
    return "made"


# -- metadata ----------------------------------------------------------------------------------


def mode_of(path):
    return lambda: stat.S_IMODE(os.stat(path).st_mode)


def other_mode(path):
    return mode_of(path)() ^ 0o020


@attempt("metadata", "state", "store", "other", "own", "readable")
def change_mode(world, what):
    file = f"{getattr(world, what)}/victim"
    return changes(mode_of(file), lambda: os.chmod(file, other_mode(file)))


@attempt("metadata", "state", "store", "other")
def change_mode_of_folder(world, what):
    folder = getattr(world, what)
    return changes(mode_of(folder), lambda: os.chmod(folder, other_mode(folder)))


@attempt("metadata", "own", "readable")
def change_mode_by_what_it_reads(world, what):
    file = f"{getattr(world, what)}/victim"
    there = os.open(file, os.O_RDONLY)
    return changes(mode_of(file), lambda: os.fchmod(there, other_mode(file)))


@attempt("metadata")
def change_mode_by_a_path_descriptor(world):
    file = f"{world.state}/victim"
    there = os.open(file, os.O_PATH)
    return changes(mode_of(file), lambda: call(452, 452, there, b"", other_mode(file), 0x1000))


@attempt("metadata")
def change_mode_by_proc(world):
    file = f"{world.state}/victim"
    there = os.open(file, os.O_PATH)
    return changes(mode_of(file), lambda: os.chmod(f"/proc/self/fd/{there}", other_mode(file)))


@attempt("metadata", "state", "readable")
def change_owner(world, what):
    file = f"{getattr(world, what)}/victim"
    groups = [each for each in (*os.getgroups(), os.getgid() + 1) if each != os.stat(file).st_gid]
    return changes(lambda: os.stat(file).st_gid, lambda: os.chown(file, -1, groups[0]))


@attempt("metadata", "state", "readable")
def change_times(world, what):
    file = f"{getattr(world, what)}/victim"
    earlier = os.stat(file).st_mtime_ns - 10**9
    return changes(lambda: os.stat(file).st_mtime_ns, lambda: os.utime(file, ns=(earlier, earlier)))


@attempt("metadata", "state", "readable")
def set_times_to_now(world, what):
    file = f"{getattr(world, what)}/victim"
    return changes(lambda: os.stat(file).st_mtime_ns, lambda: os.utime(file))


@attempt("metadata")
def change_times_by_what_it_reads(world):
    file = f"{world.readable}/victim"
    there = os.open(file, os.O_RDONLY)
    return changes(lambda: os.stat(file).st_mtime_ns, lambda: os.utime(there))


@attempt("metadata", "state", "readable")
def set_label(world, what):
    file = f"{getattr(world, what)}/victim"
    mark = os.urandom(4)
    return changes(
        lambda: os.getxattr(file, "user.mark"), lambda: os.setxattr(file, "user.mark", mark)
    )


@attempt("metadata")
def set_label_by_what_it_reads(world):
    file = f"{world.readable}/victim"
    there, mark = os.open(file, os.O_RDONLY), os.urandom(4)
    return changes(
        lambda: os.getxattr(file, "user.mark"), lambda: os.setxattr(there, "user.mark", mark)
    )


@attempt("metadata")
def remove_label(world):
    file = f"{world.readable}/labelled"
    return changes(lambda: os.listxattr(file), lambda: os.removexattr(file, "user.mark"))


@attempt("metadata")
def set_flags(world):
    there = os.open(f"{world.readable}/victim", os.O_RDONLY)

    def look():
        return fcntl.ioctl(there, 0x80086601, bytes(8))

    other = bytes([look()[0] ^ 0x40]) + look()[1:]  # not to be dumped
    return changes(look, lambda: fcntl.ioctl(there, 0x40086602, other))


@attempt("metadata")
def lease(world):
    there = os.open(f"{world.readable}/victim", os.O_RDONLY)
    fcntl.fcntl(there, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return "leased"


# -- notification ------------------------------------------------------------------------------


@attempt("notification", "state", "store", "other", "home", "shm", "readable")
def watch(world, what):
    there = check(LIBC.inotify_init1(os.O_CLOEXEC))
    path = "/dev/shm" if what == "shm" else getattr(world, what)
    return check(LIBC.inotify_add_watch(there, path.encode(), 0xFFF))


@attempt("notification")
def watch_by_fanotify(world):
    return os.close(check(LIBC.fanotify_init(0x200, os.O_RDONLY)))


@attempt("notification")
def watch_by_signal(world):
    there = os.open(world.readable, os.O_RDONLY)
    return fcntl.fcntl(there, fcntl.F_NOTIFY, 0x3F)


# -- shared memory -----------------------------------------------------------------------------


@attempt("shared memory", "server", "neighbour")
def read_shared_memory(world, whose):
    return Path("/dev/shm", getattr(world, f"{whose}_memory")).read_text()


@attempt("shared memory", "server", "neighbour")
def write_shared_memory(world, whose):
    there = os.open(f"/dev/shm/{getattr(world, f'{whose}_memory')}", os.O_RDWR)
    mmap.mmap(there, 1)[0] = 35
    return "written"


@attempt("shared memory")
def list_shared_memory(world):
    names = os.listdir("/dev/shm")
    return names if world.server_memory in names else refuse("it is not there")


@attempt("shared memory")
def remove_shared_memory(world):
    os.unlink(f"/dev/shm/{world.server_memory}-removed")
    return "removed"


@attempt("shared memory")
def attach_system_v_memory(world):
    LIBC.shmat.restype = ctypes.c_long
    return check(LIBC.shmat(world.segment, None, 0)) and "attached"


@attempt("shared memory")
def look_at_system_v_memory(world):
    return check(LIBC.shmctl(world.segment, 2, ctypes.create_string_buffer(256)))


@attempt("shared memory")
def find_system_v_memory(world):
    return check(LIBC.shmget(world.key, 0, 0))


@attempt("shared memory")
def read_system_v_semaphore(world):
    return check(LIBC.semctl(world.semaphore, 0, 12))


@attempt("shared memory")
def read_system_v_queue(world):
    return check(LIBC.msgctl(world.queue, 2, ctypes.create_string_buffer(256)))


@attempt("shared memory")
def open_posix_queue(world):
    return call(240, 180, world.posix_queue.encode(), os.O_RDONLY, 0, None)


# -- processes by /proc ------------------------------------------------------------------------

OF_A_PROCESS = ("environ", "cmdline", "status", "maps", "stat")


@attempt("/proc", *(f"{each} of the {who}" for each in OF_A_PROCESS for who in
                    ("server", "neighbour")))  # fmt: skip
def read_proc(world, what):
    name, _, who = what.partition(" of the ")
    return Path(f"/proc/{getattr(world, who)}/{name}").read_bytes()[:16].hex()


@attempt("/proc", "server", "neighbour")
def read_memory(world, who):
    pid = getattr(world, who)
    first = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16)
    with Path(f"/proc/{pid}/mem").open("rb") as file:
        file.seek(first)
        return file.read(4).hex()


@attempt("/proc")
def list_processes(world):
    return len(os.listdir("/proc"))


@attempt("/proc", "server", "neighbour")
def list_descriptors(world, who):
    return os.listdir(f"/proc/{getattr(world, who)}/fd")


# -- tracing -----------------------------------------------------------------------------------

PEOPLE = ("server", "neighbour")


@attempt("tracing", *PEOPLE)
def trace(world, who):
    pid = getattr(world, who)
    check(LIBC.ptrace(16, pid, 0, 0))  # PTRACE_ATTACH
    os.waitpid(pid, 0)
    LIBC.ptrace(17, pid, 0, 0)  # PTRACE_DETACH
    return "attached"


@attempt("tracing", *PEOPLE)
def read_by_call(world, who):
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    return is_let_through(310, 270, getattr(world, who), vector, 1, vector, 1, 0)


@attempt("tracing", *PEOPLE)
def take_descriptor(world, who):
    there = os.pidfd_open(getattr(world, who))
    return is_let_through(438, 438, there, 0, 0)


@attempt("tracing", *PEOPLE)
def compare(world, who):
    return is_let_through(312, 272, os.getpid(), getattr(world, who), 2, 0, 0)


@attempt("tracing", *PEOPLE)
def find_robust_list(world, who):
    head, size = ctypes.c_long(), ctypes.c_long()
    where = ctypes.byref(head), ctypes.byref(size)
    return call(274, 100, getattr(world, who), *where)


@attempt("tracing")
def advise(world):
    buffer = (ctypes.c_size_t * 2)(4096, 4096)
    return is_let_through(440, 440, os.pidfd_open(world.neighbour), buffer, 1, 20, 0)


@attempt("tracing")
def move_pages(world):
    return is_let_through(279, 239, world.neighbour, 0, None, None, None, 0)


# -- signals -----------------------------------------------------------------------------------


@attempt("signals", *PEOPLE)
def ask_by_kill(world, who):
    return os.kill(getattr(world, who), 0) or "sent"


@attempt("signals", *PEOPLE)
def send(world, who):
    return os.kill(getattr(world, who), signal.SIGCONT) or "sent"


@attempt("signals", *PEOPLE)
def send_to_a_thread(world, who):
    pid = getattr(world, who)
    return call(234, 131, pid, pid, int(signal.SIGCONT)) or "sent"


@attempt("signals", *PEOPLE)
def send_by_descriptor(world, who):
    return signal.pidfd_send_signal(os.pidfd_open(getattr(world, who)), signal.SIGCONT) or "sent"


@attempt("signals", *PEOPLE)
def queue(world, who):
    value = ctypes.c_void_p(0)
    return check(LIBC.sigqueue(getattr(world, who), int(signal.SIGCONT), value)) or "sent"


@attempt("signals")
def send_to_a_group(world):
    return os.killpg(os.getpgid(world.neighbour), signal.SIGCONT) or "sent"


# -- limits ------------------------------------------------------------------------------------


@attempt("limits", *PEOPLE)
def limit(world, who):
    pid = getattr(world, who)
    resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))
    return "limited"


@attempt("limits", *PEOPLE)
def change_priority(world, who):
    pid = getattr(world, who)
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))
    return "set"


@attempt("limits")
def change_priority_of_the_user(world):
    os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0))
    return "set"


@attempt("limits", *PEOPLE)
def pin(world, who):
    pid = getattr(world, who)
    cpus = os.sched_getaffinity(pid)
    if len(cpus) == 1:
        refuse("there is one processor")
    done = changes(lambda: os.sched_getaffinity(pid), lambda: os.sched_setaffinity(pid, [0]))
    os.sched_setaffinity(pid, cpus)
    return done


@attempt("limits", *PEOPLE)
def change_scheduler(world, who):
    pid = getattr(world, who)
    os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    return "set"


@attempt("limits", *PEOPLE)
def change_disk_priority(world, who):
    return call(251, 30, 1, getattr(world, who), 2 << 13 | 4) or "set"


@attempt("limits", *PEOPLE)
def be_ended_later(world, who):
    Path(f"/proc/{getattr(world, who)}/oom_score_adj").write_text("0")
    return "set"


# -- the kernel --------------------------------------------------------------------------------

NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000,
              "IPC": 0x08000000, "time": 0x80}  # fmt: skip


@attempt("kernel", *NAMESPACES)
def make_namespace(world, kind):
    return in_a_child(lambda: check(LIBC.unshare(NAMESPACES[kind])))


@attempt("kernel")
def make_namespace_by_clone(world):
    child = call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return "made"


@attempt("kernel")
def make_namespace_by_clone3(world):
    arguments = struct.pack("8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    child = call(435, 435, arguments, len(arguments))
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return "made"


@attempt("kernel")
def enter_namespace(world):
    there = os.open("/proc/self/ns/uts", os.O_RDONLY)
    return in_a_child(lambda: check(LIBC.setns(there, 0)))


@attempt("kernel")
def mount(world):
    check(LIBC.mount(b"none", world.mine.encode(), b"tmpfs", 0, None))
    return check(LIBC.umount(world.mine.encode())) or "mounted"


@attempt("kernel")
def unmount_shared_memory(world):
    return is_let_through(166, 39, b"/dev/shm/absent", 2)


@attempt("kernel")
def write_to_read_only_mounts(world):
    about = struct.pack("4Q", 0, 0, 1 << 18, 0)
    return call(442, 442, -100, b"/", 0, about, len(about)) or "set"


@attempt("kernel")
def change_root(world):
    return in_a_child(lambda: os.chroot(world.mine))


KERNEL = {
    "pivot_root": (155, 41, b"/absent", b"/absent"),
    "open_tree": (428, 428, -100, b"/", 1),
    "fsopen": (430, 430, b"tmpfs", 0),
    "keyctl": (250, 219, 0, -3, 0),
    "add_key": (248, 217, b"user", b"red", b"x", 1, -1),
    "request_key": (249, 218, b"user", b"red", None, -1),
    "bpf": (321, 280, 5, b"", 0),
    "perf_event_open": (298, 241, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 282, 1),
    "io_uring_setup": (425, 425, 0, 0),
    "init_module": (175, 105, 0, 0, b""),
    "kexec_load": (246, 104, 0, 0, 0, 0),
    "syslog": (103, 116, 10, 0, 0),
    "process_mrelease": (448, 448, -1, 0),
    "migrate_pages": (256, 238, 1 << 22, 0, 0, 0),
    "io_setup": (206, 0, 1, ctypes.create_string_buffer(8)),
    "seccomp": (317, 277, 2, 0, struct.pack("I", 0)),
    "modify_ldt": (154, -1, 0, ctypes.create_string_buffer(8), 8),
    "quotactl": (179, 60, 0x80000400, b"/absent", 0, None),
    "quotactl_fd": (443, 443, -1, 0x80000400, 0, None),
}


@attempt("kernel", *KERNEL)
def ask_the_kernel(world, name):
    return is_let_through(*KERNEL[name])


FILTER = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
"""A program that lets everything through. Its kind has one limit for the whole machine, which some
thousand processes reach; then nobody has walls."""


def filter_program():
    return struct.pack("HxxxxxxQ", 1, ctypes.addressof(FILTER))


@attempt("kernel")
def filter_calls(world):
    def install():
        check(LIBC.prctl(38, 1, 0, 0, 0))  # no new privileges
        check(LIBC.prctl(22, 2, filter_program(), 0, 0))

    return in_a_child(install)


@attempt("kernel")
def filter_packets(world):
    ours, other = socket.socketpair()
    with ours, other:
        ours.setsockopt(socket.SOL_SOCKET, 26, filter_program())
    return "filtered"


@attempt("kernel")
def call_by_another_table(world):
    return is_let_through(0x40000000 | 39, 0x40000000 | 172)


@attempt("kernel", "/dev/kvm", "/dev/fuse", "/dev/ptmx", "/dev/tty", "/dev/loop-control",
         "/dev/net/tun")  # fmt: skip
def open_device(world, device):
    os.close(os.open(device, os.O_RDWR | os.O_NOCTTY))
    return "open"


# -- becoming another --------------------------------------------------------------------------


@attempt("privileges", "root", "another")
def become(world, who):
    """Become who it is not yet."""
    uid = 0 if who == "root" and os.getuid() else 12345
    return in_a_child(lambda: os.setresuid(uid, uid, uid))


@attempt("privileges")
def set_groups(world):
    return in_a_child(lambda: os.setgroups([0, 6]))


@attempt("privileges")
def take_capabilities(world):
    header, all_of_it = (
        struct.pack("Ii", 0x20080522, 0),
        struct.pack("6I", *(1 << 21,) * 3, 0, 0, 0),
    )
    return in_a_child(lambda: check(LIBC.capset(header, all_of_it)))


@attempt("privileges")
def take_ambient_capability(world):
    header, inherited = (
        struct.pack("Ii", 0x20080522, 0),
        struct.pack("6I", *(1 << 21,) * 3, 0, 0, 0),
    )

    def take():
        LIBC.capset(header, inherited)
        check(LIBC.prctl(47, 2, 21, 0, 0))

    return in_a_child(take)


@attempt("privileges")
def run_a_set_uid_program(world):
    """What `world.privileged` prints is its effective user, which its owner would be."""
    ran = subprocess.run([world.privileged, "-u"], capture_output=True, text=True)
    if ran.returncode or int(ran.stdout) == os.geteuid():
        refuse("it ran as before, or not at all")
    return ran.stdout


@attempt("privileges")
def never_be_ended(world):
    Path("/proc/self/oom_score_adj").write_text("-999")
    return "set"


@attempt("privileges")
def raise_a_limit(world):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))
    except ValueError as error:
        refuse(str(error))
    return "raised"


# -- network: none -----------------------------------------------------------------------------

FAMILIES = {"IP": 2, "IPv6": 10, "Unix": 1, "netlink": 16, "packets": 17, "VSOCK": 40, "ALG": 38,
            "RDS": 21, "TIPC": 30, "CAN": 29, "Bluetooth": 31, "XDP": 44, "SMC": 43}  # fmt: skip


@attempt("network", *FAMILIES)
def make_socket(world, family):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        with contextlib.suppress(OSError), socket.socket(FAMILIES[family], kind) as made:
            if family == "Unix" and kind == socket.SOCK_SEQPACKET:  # CUDA listens with one
                made.bind("")  # to an abstract name
                made.listen()
                with socket.socket(socket.AF_UNIX, kind) as connection:
                    connection.connect(made.getsockname())
            return "made"
    return refuse("there is none of that kind")


@attempt("network")
def call_the_server(world):
    with socket.create_connection(("127.0.0.1", world.port), timeout=5) as connection:
        connection.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        return connection.recv(12).decode()


@attempt("network", "unix_path", "abstract")
def connect_to(world, where):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(getattr(world, where))
        return "connected"


@attempt("network", "datagram_path", "datagram_name")
def send_a_datagram_to(world, where):
    """Use a pair of sockets, which is made without calling `socket`."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, other:
        ours.sendto(b"x", getattr(world, where))
    return "sent"


@attempt("network")
def listen(world):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
    return "listens"


@attempt("network")
def send_raw(world):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP):
        return "open"


# -- secrets -----------------------------------------------------------------------------------


@attempt("environment", "MODELYARD_SIGNING_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "UNHEARD_OF")
def read_variable(world, name):
    if name not in os.environ:
        raise FileNotFoundError(errno.ENOENT, "no such variable")
    return os.environ[name]


@attempt("environment")
def find_secret_in_memory(world):
    """In what the kernel shows of the environment at the start of this process."""
    text = Path("/proc/self/environ").read_bytes()
    return "there" if b"a signing key" in text else refuse("it is not there")


# -- looking at names that it knows ------------------------------------------------------------


@attempt("looking")
def look_at_a_file(world):
    return os.stat(f"{world.state}/victim").st_size


@attempt("looking")
def ask_for_rights(world):
    check(LIBC.access(f"{world.state}/victim".encode(), os.F_OK))
    return "there"


@attempt("looking")
def read_a_link(world):
    return os.readlink(f"{world.state}/link")


@attempt("looking")
def work_there(world):
    before = os.getcwd()
    os.chdir(world.state)
    try:
        return os.stat("victim").st_size
    finally:
        os.chdir(before)


@attempt("looking")
def look_at_a_file_system(world):
    return os.statvfs(f"{world.state}/victim").f_bfree


@attempt("looking")
def look_at_another_models_file(world):
    return os.stat(f"{world.other}/victim").st_size


@attempt("looking")
def look_where_another_model_writes(world):
    return os.stat(f"{world.scratch}/victim").st_size


@attempt("looking")
def look_upwards(world):
    """From a folder of its own, by a descriptor."""
    own = os.open(world.own, os.O_PATH)
    for _ in range(4):
        own = os.open("..", os.O_PATH, dir_fd=own)
        with contextlib.suppress(OSError):
            return os.stat("keys.json", dir_fd=own).st_size
    return refuse("it is nowhere above")


@attempt("looking")
def look_as_another_process(world):
    return os.stat(f"/proc/self/task/{os.getpid()}/root{world.state}/victim").st_size


@attempt("looking elsewhere")
def look_at_an_archive(world):
    return os.stat(f"{world.store}/victim").st_size


@attempt("looking elsewhere")
def look_at_a_file_at_home(world):
    return os.stat(f"{world.home}/victim").st_size


@attempt("looking")
def read_a_label(world):
    return os.getxattr(f"{world.state}/labelled", "user.mark").decode()


@attempt("looking")
def find_a_handle(world):
    handle = ctypes.create_string_buffer(struct.pack("II", 128, 0) + bytes(128))
    path = f"{world.state}/victim".encode()
    return check(LIBC.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0))
