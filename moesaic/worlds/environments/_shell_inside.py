"""What `shell.py` runs in the sandbox: lay out a directory, run one command in it, tell what came of both.

It runs as a program of its own inside the jail, so it imports nothing but the standard library. On its input is JSON
with `files`, `command` and `seconds`; on its output JSON with `output`, `code`, and `files` as they are then, or
`problem` if they cannot be told. A file is [mode, kind, content], its content in base64.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from typing import Any

PLACE = "work"
LAST_CHANGED = 1_704_067_200  # of every file: what a command says must not depend on when it was run
MOST_FILES, MOST_BYTES = 400, 400_000
MOST_OUTPUT = 3_000


def lay_out(files: dict[str, Any]) -> None:
    """Directories come before what is in them, and get their modes last."""
    os.mkdir(PLACE)
    for path, (mode, kind, content) in files.items():
        target = os.path.join(PLACE, path)
        if kind == "directory":
            os.mkdir(target, 0o700)
        elif kind == "link":
            os.symlink(content, target)
        else:
            with open(target, "wb") as file:
                file.write(base64.b64decode(content))
            os.chmod(target, mode)
    for path, (mode, kind, _) in reversed(files.items()):
        target = os.path.join(PLACE, path)
        os.utime(target, (LAST_CHANGED, LAST_CHANGED), follow_symlinks=False)
        if kind == "directory":
            os.chmod(target, mode)
    for target in (PLACE, "."):
        os.utime(target, (LAST_CHANGED, LAST_CHANGED))


def taken_down() -> dict[str, Any]:
    """Everything below the directory, whatever its modes are by now. Sockets, pipes and the like are left out."""
    found: dict[str, Any] = {}
    size = 0
    waiting = [""]
    if not os.path.isdir(PLACE):
        raise ValueError("your directory is gone")
    while waiting:
        folder = waiting.pop()
        os.chmod(os.path.join(PLACE, folder), 0o700)
        for name in sorted(os.listdir(os.path.join(PLACE, folder))):
            path = os.path.join(folder, name)
            target = os.path.join(PLACE, path)
            known = os.lstat(target)
            mode = stat.S_IMODE(known.st_mode)
            if stat.S_ISDIR(known.st_mode):
                found[path] = [mode, "directory", ""]
                waiting.append(path)
            elif stat.S_ISLNK(known.st_mode):
                found[path] = [mode, "link", os.readlink(target)]
            elif stat.S_ISREG(known.st_mode):
                os.chmod(target, 0o600)
                size += known.st_size
                if size > MOST_BYTES:
                    raise ValueError(f"there are more than {MOST_BYTES} bytes in your directory")
                with open(target, "rb") as file:
                    found[path] = [mode, "file", base64.b64encode(file.read()).decode()]
            if len(found) > MOST_FILES:
                raise ValueError(f"there are more than {MOST_FILES} files in your directory")
    return found


def start(command: str, out: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=PLACE,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin", "HOME": os.path.abspath(PLACE), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
        start_new_session=True,
    )


def wait(shell: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        code = shell.wait(seconds)
    except subprocess.TimeoutExpired:
        code = 124
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    return code


def said(out: int) -> str:
    raw = os.pread(out, MOST_OUTPUT + 1, 0)
    text = raw[:MOST_OUTPUT].decode(errors="replace") + ("\n..." if len(raw) > MOST_OUTPUT else "")
    # Who owns a file is a number that differs each time; `ls -l` shows it.
    return re.sub(rf"\b{os.getuid()}(\s+){os.getgid()}\b", r"agent\1agent", text)


def main() -> None:
    asked = json.load(sys.stdin)
    lay_out(asked["files"])
    # Not a pipe, which a process left in the background would hold open, nor a file that a command could remove.
    out = os.memfd_create("output")
    told: dict[str, Any] = {}
    try:
        shell = start(asked["command"], out)
    except PermissionError as error:  # a jail in which no process may be started
        told["refused"] = str(error)
    else:
        told["code"] = wait(shell, asked["seconds"])
        told["output"] = said(out)
        try:
            told["files"] = taken_down()
        except (OSError, ValueError) as error:
            told["problem"] = str(error)[:200]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
