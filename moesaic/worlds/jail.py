"""Shut a Python program in: the process between `sandbox.py` and the code that nobody has read.

It runs as a script of its own (`python -I -S jail.py`, the request as JSON on stdin) because all this must happen
between fork and exec, where a process with threads, such as a trainer, must not do more than a few system calls. So it
imports nothing but the standard library. There are three processes: the *keeper* (this one) watches the clock, the
*first* of the new process namespace builds the file system and waits, and the *program* gives up what is left and
becomes the interpreter. Whoever kills the first kills everything that the program has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import stat
import sys
import time
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USERS = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PROCESSES, NEW_NETWORK, NEW_CGROUPS, NEW_TIME = 0x20000000, 0x40000000, 0x2000000, 0x80

READ_ONLY, NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
DIE_WITH_PARENT, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 22, 36, 38  # of prctl
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, MOUNT_SETATTR = 444, 445, 446, 442  # the same on every machine

BUILDING = 20.0  # seconds, on a machine that is very busy
INSIDE = "/inside"  # where the program's own directory is, in its new root
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")


class Refused(Exception):
    """This machine lets us build no jail that would hold."""


def call(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    call(f"mount {target}", LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def read_only(target: str, *, recursive: bool, devices: bool = False) -> None:
    """Only adds flags, on all mounts below: a remount would have to repeat those that may not be taken away."""
    flags = READ_ONLY | NO_SUID | (0 if devices else NO_DEVICES)
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    here, below = -100, 0x8000 if recursive else 0
    result = LIBC.syscall(MOUNT_SETATTR, here, target.encode(), below, ctypes.byref(attributes), 32)
    call(f"make {target} read-only", result)


def prctl(option: int, *values: Any) -> None:
    call("prctl", LIBC.prctl(option, *(values + (0,) * (4 - len(values)))))


# --- the keeper ---------------------------------------------------------------------------------------------------


def keep(request: dict[str, Any], status: int) -> None:
    """Start the first, wait until it ends or the time is over or the sandbox says stop, and leave nobody behind."""
    waited_for = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    prctl(DIE_WITH_PARENT, signal.SIGTERM)  # so that there is time to clear away
    prctl(SUBREAPER, 1)
    above = os.open(os.path.dirname(request["directory"]), os.O_PATH)  # its path will be out of sight
    request["root"] = os.geteuid() == 0
    request["uid"] = separate_uid() if request["root"] else os.getuid()
    request["tasks_before"] = 0 if request["root"] else tasks_of(request["uid"])
    isolated = request["namespaces"] and unshare(request["root"])
    begun, begins = os.pipe()  # closes when the program becomes the interpreter: its time begins then

    first = os.fork()
    if not first:
        guarded(status, lambda: be_first(request, isolated, waited_for, begins, status))
    os.close(begins)
    select.select([begun], [], [], BUILDING)
    end = time.monotonic() + request["seconds"]
    while (left := end - time.monotonic()) > 0:
        received = signal.sigtimedwait(waited_for, left)
        if received is None or received.si_signo == signal.SIGTERM:
            break
        if os.waitpid(first, os.WNOHANG)[0]:
            first = 0
            break
    if first:
        os.kill(first, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    if os.getppid() != request["parent"]:  # killed, and cannot clear away itself
        clear(os.path.basename(request["directory"]), above)
    elif first:
        tell(status, stopped=True)


def clear(name: str, above: int) -> None:
    """Remove a directory, whatever a program did to it.

    What lies deep is brought up before it is removed: a program can go deeper than a path is long.
    """
    unused, brought_up = os.urandom(8).hex(), 0
    top = open_directory(name, above)
    while entries := os.listdir(top):
        for entry in entries:
            if not is_directory(entry, top):
                os.unlink(entry, dir_fd=top)
                continue
            folder = open_directory(entry, top)
            for deep in os.listdir(folder):
                if is_directory(deep, folder):
                    os.chmod(deep, 0o700, dir_fd=folder)
                os.rename(deep, f"{unused}{brought_up}", src_dir_fd=folder, dst_dir_fd=top)
                brought_up += 1
            os.close(folder)
            os.rmdir(entry, dir_fd=top)
    os.close(top)
    os.rmdir(name, dir_fd=above)


def open_directory(name: str, above: int) -> int:
    os.chmod(name, 0o700, dir_fd=above)
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=above)


def is_directory(name: str, above: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)


def separate_uid() -> int:
    """One that nobody else has: process limits count per user, and it owns no file but its own."""
    with open("/proc/self/uid_map") as lines:
        spans = [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]
    wanted = 100_000_000 + os.getpid()
    known = any(first <= wanted < first + count for first, count in spans)
    return wanted if known else 60_000 + os.getpid() % 5_000


def tasks_of(uid: int) -> int:
    """How many threads a user runs."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended meanwhile
    return count


def unshare(root: bool) -> bool:
    """New namespaces for what will be forked, all or none. Only root needs no user namespace for the others."""
    uid, gid = os.getuid(), os.getgid()
    flags = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PROCESSES | NEW_NETWORK | NEW_CGROUPS
    if LIBC.unshare(flags | (0 if root else NEW_USERS)) != 0:
        return False
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def tell(status: int, **facts: Any) -> None:
    os.write(status, json.dumps(facts).encode() + b"\n")


def guarded(status: int, work: Any) -> NoReturn:
    """A forked process must never return into its parent's code."""
    try:
        work()
    except BaseException as error:
        tell(status, refused=f"{error}" or type(error).__name__)
    os._exit(1)


# --- the first ----------------------------------------------------------------------------------------------------


def be_first(request: dict[str, Any], isolated: bool, blocked: set[signal.Signals], begins: int, status: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no handler: nobody inside can signal the first of a namespace
    prctl(DIE_WITH_PARENT, signal.SIGKILL)
    enclosed, place = False, request["directory"]
    if isolated:
        try:
            build_root(request)
            enclosed, place = True, INSIDE
        except OSError:
            LIBC.umount2(place.encode(), DETACH)  # the kernel gave us namespaces, and no right to mount all in them
    if not enclosed and request["root"]:
        os.chown(place, request["uid"], request["uid"])
    with open(f"{place}/main.py", "w", encoding="utf-8") as file:
        file.write(request["code"])

    program = os.fork()
    if not program:
        guarded(status, lambda: become_program(request, isolated, enclosed, place, status))
    os.close(begins)
    while True:
        ended, code = os.wait()
        if ended == program:
            tell(status, ended=os.waitstatus_to_exitcode(code))
            os._exit(0)


def build_root(request: dict[str, Any]) -> None:
    """A new root in memory: the interpreter and the system's libraries to read, one directory to write, no more."""
    root = request["directory"]
    mount("", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=755")
    for path in readable(request["interpreter"]):
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.path.realpath(path), target)
        else:
            bind(path, target)
    for path in (*DEVICES, *request["devices"]):
        os.makedirs(root + "/dev", exist_ok=True)
        bind(path, root + path, devices=True)
    os.mkdir(root + INSIDE)
    if not os.path.lexists(root + "/tmp"):  # else the interpreter lies there; TMPDIR says where to write
        os.symlink(INSIDE, root + "/tmp")
    owner = f"uid={request['uid']},gid={request['uid'] if request['root'] else os.getgid()}"
    size = f"size={request['disk_bytes']},nr_inodes=4096,mode=700,{owner}"
    mount("tmpfs", root + INSIDE, "tmpfs", NO_SUID | NO_DEVICES, size)

    os.chdir(root)
    call("pivot_root", LIBC.syscall(PIVOT_ROOT[platform.machine()], b".", b"."))  # the old root lies over the new
    call("umount", LIBC.umount2(b".", DETACH))
    os.chdir("/")
    read_only("/", recursive=False)


def bind(path: str, target: str, *, devices: bool = False) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, "", BIND | RECURSIVE)
    read_only(target, recursive=not devices, devices=devices)


def readable(interpreter: dict[str, Any]) -> list[str]:
    """The system's libraries, the interpreter's prefixes, and what its links lead through; none inside another."""
    paths = [*SYSTEM, *interpreter["prefixes"], *map(os.path.realpath, interpreter["prefixes"])]
    hop = interpreter["executable"]
    while os.path.islink(hop):
        hop = os.path.join(os.path.dirname(hop), os.readlink(hop))
        paths.append(os.path.dirname(os.path.dirname(os.path.normpath(hop))))
    kept: list[str] = []
    for path in sorted(set(map(os.path.normpath, paths)), key=len):
        inside = any(path == above or path.startswith(above + "/") for above in kept)
        if path != "/" and os.path.exists(path) and not inside:
            kept.append(path)
    return kept


# --- the program --------------------------------------------------------------------------------------------------


def become_program(request: dict[str, Any], isolated: bool, enclosed: bool, place: str, status: int) -> None:
    apart = isolated and enclosed  # it sees no process, no file and no network of ours
    os.set_inheritable(status, False)
    os.setsid()  # a signal to its own group must not reach the keeper
    feed = os.memfd_create("stdin")
    os.write(feed, request["stdin"].encode())
    os.lseek(feed, 0, os.SEEK_SET)
    os.dup2(feed, 0)
    os.chdir(place)
    os.umask(0o077)
    limit(request, apart)
    if request["root"]:
        os.setgroups([])
        os.setresgid(*[request["uid"]] * 3)
        os.setresuid(*[request["uid"]] * 3)
    prctl(DIE_WITH_PARENT, signal.SIGKILL)  # after the change of user, which undoes it
    prctl(NO_NEW_PRIVILEGES, 1)
    if not apart and not confine_files(request, place) and not request["root"]:
        raise Refused("neither namespaces nor Landlock (Linux 6.2 or later) keep a program from the user's files here")
    filter_calls(request["filters"], among_us=not apart)
    tell(status, level="namespaces" if apart else "guarded")
    executable = request["interpreter"]["executable"]
    surroundings = {
        **{name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")},
        **{"PATH": "/usr/bin:/bin", "HOME": place, "TMPDIR": place, "LANG": "C.UTF-8"},
    }
    os.execve(executable, [executable, "-I", "-B", "-X", "utf8", f"{place}/main.py"], surroundings)


def limit(request: dict[str, Any], apart: bool) -> None:
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    # Before 5.14, and outside a user namespace always, the limit counts everything the user runs.
    before = 0 if apart and release >= (5, 14) else request["tasks_before"]
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(request["seconds"]) + 2,
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_FSIZE: request["disk_bytes"],
        resource.RLIMIT_NPROC: before + request["processes"] + 1,  # the first counts where it is the same user
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def confine_files(request: dict[str, Any], place: str) -> bool:
    """Landlock: read the interpreter and the system's libraries, write one directory. False where there is none."""
    version = LIBC.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 3:  # the first that knows how to forbid truncating a file
        return False
    of_files = 1 | 2 | 4 | 1 << 14  # execute, write, read, truncate
    all_rights = (1 << (16 if version >= 5 else 15)) - 1
    rules = call("landlock", LIBC.syscall(LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(all_rights)), 8, 0))
    allowed = {path: 1 | 4 | 8 for path in readable(request["interpreter"])}
    allowed |= {path: 2 | 4 | 1 << 15 for path in request["devices"]}  # 1 << 15: ioctl, which a GPU's driver needs
    allowed |= {path: 2 | 4 for path in DEVICES} | {place: all_rights}
    for path, rights in allowed.items():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= (of_files | 1 << 15) & all_rights
        rule = rights.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        call(f"landlock {path}", LIBC.syscall(LANDLOCK_ADD, rules, 1, rule, 0))
        os.close(opened)
    call("landlock", LIBC.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)
    return True


def filter_calls(filters: dict[str, str], among_us: bool) -> None:
    """A seccomp filter (`seccomp.py`): the calls it names fail, for this process and all it starts, for good."""
    packed = bytes.fromhex(filters["among_us" if among_us else "apart"])
    memory = ctypes.create_string_buffer(packed, len(packed))
    steps, address = len(packed) // 8, ctypes.addressof(memory)
    prctl(SECCOMP, 2, steps.to_bytes(2, sys.byteorder) + bytes(6) + address.to_bytes(8, sys.byteorder))


if __name__ == "__main__":
    keep(json.load(sys.stdin), int(sys.argv[1]))
