"""Start a Chromium that can reach nothing, wait for its end, and clear away; the process between us and the browser.

It runs as a program of its own (`python -I -S _keep_chromium.py COMMANDS ANSWERS PROFILE UID chromium ...`), because a
process with threads must not do this between fork and exec. The browser gets a network of its own with nothing in it
where the machine allows that, a user that owns nothing but its profile where we are root, and the two pipes of the
DevTools protocol as its descriptors 3 and 4. It ends by itself when the other end of its pipes is closed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys

NEW_USERS, NEW_NETWORK, NO_NEW_PRIVILEGES = 0x10000000, 0x40000000, 38
LIBC = ctypes.CDLL(None, use_errno=True)


def leave_network() -> None:
    """Where it is forbidden there are still a proxy that is not there, and requests that are answered by us alone."""
    uid, gid = os.getuid(), os.getgid()
    if LIBC.unshare(NEW_NETWORK | (0 if uid == 0 else NEW_USERS)) != 0 or uid == 0:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become_browser(commands: int, answers: int, profile: str, uid: int, arguments: list[str]) -> None:
    high = [os.dup2(descriptor, 100 + n) for n, descriptor in enumerate((commands, answers))]  # 3 and 4 may be taken
    os.dup2(high[0], 3, inheritable=True)
    os.dup2(high[1], 4, inheritable=True)
    os.closerange(5, 200)
    leave_network()
    if uid:
        os.chown(profile, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.chdir(profile)
    surroundings = {"PATH": "/usr/bin:/bin", "HOME": profile, "TMPDIR": profile, "LANG": "C.UTF-8", "TZ": "UTC"}
    os.execve(arguments[0], arguments, surroundings)


def main() -> None:
    commands, answers, profile, uid, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ours to end, not the terminal's
    browser = os.fork()
    if not browser:
        try:
            become_browser(int(commands), int(answers), profile, int(uid), arguments)
        finally:
            os._exit(127)
    os.close(int(commands))
    os.close(int(answers))
    os.waitpid(browser, 0)
    shutil.rmtree(profile, ignore_errors=True)


if __name__ == "__main__":
    main()
