"""Run Python code that nobody has read, such as what a model wrote, so that it can harm nothing but itself.

    run_python("print(1 + 1)").stdout                     # "2\\n"
    run_python("while True: pass", limits=Limits(seconds=1)).why

Every program runs as a process of its own with limits on time, memory per process, the size of files, the number of
processes and open files, and output; with an environment of a few constants; with no way to gain privileges
(no_new_privs), and under a seccomp filter. What else holds it depends on what the machine allows, and is said in
`Result.level`:

`namespaces` (root, or a user who may make user namespaces; Linux 5.12). The program has a network of its own with
nothing in it, sees no process but its own, and a file system in memory of which it can write one directory and read the
interpreter, its packages and the system's libraries: no home, no /proc, no file of ours. All of it is gone when
the program ends, and so are the processes it started. Started by root it runs as a user that has no files.

`guarded` (a container that forbids namespaces). It may start threads but no processes, open no sockets, send no
signals, change no file's mode; Landlock lets it write only its temporary directory and read only the above. Started by
root it runs as a user of its own, which alone must do where the kernel has no Landlock: then it can read what
everybody can, and write where everybody can (/tmp). Its directory has no limit in all, only each file has.

Where neither can be had the code is not run: `UserError`. Memory is limited for each process and not for all together,
so that `processes` times `memory_mb` is the most a program takes. The kernel itself is shared: this stops programs that
do wrong or cheat, and is no wall against somebody with a hole in the kernel.
"""

from __future__ import annotations

import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from moesaic.errors import UserError
from moesaic.worlds.jail import clear
from moesaic.worlds.seccomp import call_filter

GRACE = 30.0  # seconds a jail may take to build and to clear away
LAUNCHER = Path(__file__).with_name("jail.py")
MACHINES = ("x86_64", "aarch64")
ATTEMPTS = 3  # somebody else's kill (the kernel's, when memory runs out) is no part of what a program does


@dataclass(frozen=True)
class Limits:
    """What one program may take."""

    seconds: float = 5.0
    memory_mb: int = 512  # address space of each process
    disk_mb: int = 16
    processes: int = 16  # threads count too
    open_files: int = 64
    output_bytes: int = 100_000  # of stdout and of stderr


@dataclass(frozen=True)
class Result:
    """What a program said, and how it ended. `ok`: by itself, with exit code 0; if not, `why` says so in words."""

    ok: bool
    stdout: str
    stderr: str
    why: str
    seconds: float
    level: str = ""


def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    namespaces: bool = True,
    devices: tuple[str, ...] = (),
) -> Result:
    """Run a program and wait for it; whatever it does ends in a Result. `namespaces=False`: at the lesser level.
    One that is killed from outside is run again, as nothing of it is left.

    `devices` are paths in /dev that it may use beside the usual few, such as a GPU's.
    """
    limits = limits or Limits()
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        raise UserError("sandbox", "code is run only on Linux, on x86-64 or arm64", "Leave out rewards that run code.")
    started = time.monotonic()
    for _ in range(ATTEMPTS):
        facts, out, error, overflow = _run_once(code, stdin, limits, namespaces, devices)
        if not facts.get("killed"):
            break
    seconds = time.monotonic() - started

    if "refused" in facts:
        remedy = "Allow user namespaces, or install Python where every user can read it."
        raise UserError("sandbox", f"this machine does not let us shut code in: {facts['refused']}", remedy)
    if not {"level", "stopped", "killed"} & set(facts):
        raise RuntimeError(f"the sandbox did not start: {error.decode(errors='replace')[-500:]}")
    why = _why(facts, limits, overflow)
    stdout, stderr = (part[: limits.output_bytes].decode(errors="replace") for part in (out, error))
    return Result(not why, stdout, stderr, why, seconds, facts.get("level", ""))


def _run_once(
    code: str, stdin: str, limits: Limits, namespaces: bool, devices: tuple[str, ...]
) -> tuple[dict[str, Any], bytes, bytes, bool]:
    with _directory() as directory, tempfile.TemporaryFile() as request:
        asked = {
            "code": _writable(code),
            "stdin": _writable(stdin),
            "directory": directory,
            "parent": os.getpid(),
            "namespaces": namespaces,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "devices": devices,
            "filters": _filters(platform.machine()),
            "interpreter": {
                "executable": os.path.abspath(sys.executable),
                "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix],
            },
        }
        request.write(json.dumps(asked).encode())
        request.seek(0)
        return _watch(request, limits)


@cache
def _filters(processor: str) -> dict[str, str]:
    """What `jail.py` installs, where the program lives apart from us and where it does not."""
    return {name: call_filter(name == "among_us", processor).hex() for name in ("apart", "among_us")}


def _watch(request: IO[bytes], limits: Limits) -> tuple[dict[str, Any], bytes, bytes, bool]:
    """Start the keeper and read until it has ended: what it tells, stdout, stderr, and whether they were too much."""
    read_status, write_status = os.pipe()
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), str(write_status)],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_status,),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(read_status)
        raise
    finally:
        os.close(write_status)
    assert keeper.stdout and keeper.stderr
    said = {keeper.stdout.fileno(): bytearray(), keeper.stderr.fileno(): bytearray(), read_status: bytearray()}
    overflow = False
    deadline = time.monotonic() + limits.seconds + GRACE
    try:
        with selectors.DefaultSelector() as selector:
            for stream in said:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fd)
                    elif len(said[key.fd]) <= limits.output_bytes:
                        said[key.fd] += chunk
                    elif not overflow:
                        overflow = True
                        keeper.terminate()  # it ends the rest
    finally:
        _end(keeper)
        os.close(read_status)
        keeper.stdout.close()
        keeper.stderr.close()
    out, error, told = (bytes(part) for part in said.values())
    facts: dict[str, Any] = {}
    for line in told.splitlines():
        facts |= json.loads(line)
    if keeper.returncode == -signal.SIGKILL and time.monotonic() < deadline and not overflow:
        facts["killed"] = True
    return facts, out, error, overflow


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Ended by itself nearly always; asked to stop if we are interrupted, and killed if it does not listen."""
    try:
        keeper.terminate()
        keeper.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(keeper.pid, signal.SIGKILL)  # those below die with it
        keeper.wait()


def _why(facts: dict[str, Any], limits: Limits, overflow: bool) -> str:
    if overflow:
        return f"more than {limits.output_bytes} bytes of output"
    if "stopped" in facts:
        return f"not done after {limits.seconds:g} s"
    if "ended" not in facts:
        return "killed from outside"
    code = int(facts["ended"])
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" if -code < signal.SIGRTMIN else f"killed by signal {-code}"
    return f"exit code {code}" if code else ""


def _writable(text: str) -> str:
    """Half a character (a lone surrogate), which a model may well say, cannot be written to a file."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def _directory() -> Iterator[str]:
    """A temporary directory that goes away whatever the program makes of it."""
    path = tempfile.mkdtemp(prefix="moesaic-sandbox-")
    above = os.open(os.path.dirname(path), os.O_PATH)
    try:
        yield path
    finally:
        clear(os.path.basename(path), above)
        os.close(above)
