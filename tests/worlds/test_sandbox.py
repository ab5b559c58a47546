"""Code in the sandbox attacks what is around it; all of it must stand, whoever runs the sandbox, at each level.

Each attack runs from a small process, the caller, once for every pair of user (root where the tests run as root, and
an ordinary user) and level. After each the caller must live, have no children, zombies included, and an empty
temporary directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moesaic.worlds.sandbox import Limits, run_python
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
ORDINARY = 12345  # a user without an account
SECRET = "the-parents-secret"
CALLER = """
import dataclasses, json, sys
from moesaic.worlds.sandbox import Limits, run_python
for line in sys.stdin:
    asked = json.loads(line)
    result = run_python(asked["code"], limits=Limits(**asked["limits"]), namespaces=asked["namespaces"])
    print(json.dumps(dataclasses.asdict(result)), flush=True)
"""


def identity(user: str) -> dict[str, Any]:
    return dict(user=ORDINARY, group=ORDINARY, extra_groups=[]) if user == "ordinary" and os.geteuid() == 0 else {}


def interpreter(user: str, level: str) -> str:
    """One that the program's user can reach; in a namespace the sandbox itself sees to that."""
    if os.geteuid() != 0 or (user, level) == ("root", "namespaces"):
        return sys.executable
    for candidate in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            new_enough = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(new_enough, **identity("ordinary")).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.fail("no Python 3.11 on this machine that an ordinary user could run")


class Caller:
    def __init__(self, user: str, level: str, folder: Path) -> None:
        self.level, self.folder = level, folder
        folder.mkdir()
        if identity(user):
            os.chown(folder, ORDINARY, ORDINARY)
        self.process = subprocess.Popen(
            [interpreter(user, level), "-c", CALLER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={
                "PYTHONPATH": str(REPOSITORY),
                "TMPDIR": str(folder),
                "SECRET": SECRET,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            **identity(user),
        )

    def start(self, code: str, **limits: Any) -> None:
        assert self.process.stdin
        asked = {"code": code, "limits": {"seconds": 200} | limits, "namespaces": self.level == "namespaces"}
        print(json.dumps(asked), file=self.process.stdin, flush=True)

    def run(self, code: str, **limits: Any) -> dict[str, Any]:
        self.start(code, **limits)
        assert self.process.stdout
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert result["level"] == self.level
        assert result["seconds"] < 600
        self.unharmed()
        return result

    def unharmed(self) -> None:
        assert self.process.poll() is None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        assert children == ""
        assert list(self.folder.iterdir()) == []

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


USERS = ["root", "ordinary"] if os.geteuid() == 0 else ["ordinary"]
LEVELS = ["namespaces", "guarded"]


@contextmanager
def public_folder() -> Iterator[Path]:
    """Not pytest's, which it shuts to all but the user that runs the tests."""
    with tempfile.TemporaryDirectory(prefix="moesaic-test-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture(scope="module", params=[(user, level) for user in USERS for level in LEVELS], ids=str)
def caller(request: pytest.FixtureRequest) -> Iterator[Caller]:
    with public_folder() as folder:
        caller = Caller(*request.param, folder / "temporary")
        yield caller
        caller.close()


@pytest.fixture
def open_folder(caller: Caller) -> Iterator[Path]:
    """A folder and a file in it that the modes of files let everybody write."""
    folder = caller.folder.parent / "open"
    folder.mkdir()
    folder.chmod(0o777)
    file = folder / "precious"
    file.write_text("precious")
    file.chmod(0o666)
    yield folder
    file.unlink()
    folder.rmdir()


def running(marker: str) -> list[str]:
    """The processes whose command line holds a word, other than those that only pass it on."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_text(errors="replace"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


class TestAProgramThatMeansWell:
    def test_runs_and_says_how_it_ended(self, caller: Caller) -> None:
        good = caller.run("import sys\nprint('out')\nprint('error', file=sys.stderr)")
        assert (good["ok"], good["stdout"], good["stderr"], good["why"]) == (True, "out\n", "error\n", "")
        wrong = caller.run("raise SystemExit(3)")
        assert (wrong["ok"], wrong["why"]) == (False, "exit code 3")
        raised = caller.run("1 / 0")
        assert not raised["ok"] and "ZeroDivisionError" in raised["stderr"]

    def test_has_a_directory_of_its_own_to_write_in(self, caller: Caller) -> None:
        code = "import tempfile; open('a', 'w').write('b'); print(open('a').read(), tempfile.mkdtemp() != '')"
        assert caller.run(code)["stdout"] == "b True\n"

    def test_may_use_threads(self, caller: Caller) -> None:
        code = "import threading; t = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
        assert caller.run(code)["stdout"] == "hi\n"

    def test_reads_what_it_is_given_and_has_our_packages(self) -> None:
        code = "import sys, numpy; print(int(numpy.array(sys.stdin.read().split(), dtype=int).sum()))"
        assert run_python(code, stdin="1 2 3").stdout == "6\n"
        assert run_python("print(input())", stdin="grüße").stdout == "grüße\n"

    def test_is_run_by_an_interpreter_behind_links(self, tmp_path: Path) -> None:
        (tmp_path / "once").symlink_to(sys.prefix)
        (tmp_path / "twice").symlink_to("once")
        code = "from moesaic.worlds.sandbox import run_python; print(run_python('print(6 * 7)').stdout)"
        behind = [str(tmp_path / "twice" / "bin" / Path(sys.executable).name), "-c", code]
        done = subprocess.run(behind, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.stdout.strip() == "42", done.stderr

    def test_many_at_once(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            results = list(
                pool.map(lambda number: run_python(f"print({number})", limits=Limits(seconds=200)), range(16))
            )
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(16)]

    def test_half_a_character(self) -> None:
        assert run_python("print('\ud800' + input())", stdin="\udfff").stdout == "??\n"


class TestAProgramThatTakesTooMuch:
    @pytest.mark.parametrize(
        "code",
        [
            "while True: pass",
            "import time; time.sleep(1000)",
            "import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
            "while True: pass",
            "import os\nos.close(1); os.close(2)\nwhile True: pass",
        ],
    )
    def test_time(self, caller: Caller, code: str) -> None:
        result = caller.run(code, seconds=0.4)
        assert (result["ok"], result["why"]) == (False, "not done after 0.4 s")

    def test_processes(self, caller: Caller) -> None:
        bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
        assert not caller.run(bomb, seconds=1)["ok"]
        count = "import os, time\nmade = 0\ntry:\n  while True:\n    if not os.fork(): time.sleep(100)\n"
        count += "    made += 1\nexcept OSError: print(made)"
        most = {"namespaces": range(1, 11), "guarded": range(1)}[caller.level]
        assert int(caller.run(count, seconds=200, processes=10)["stdout"]) in most

    def test_threads(self, caller: Caller) -> None:
        code = "import threading, time\nmade = 0\ntry:\n  while made < 300:\n    "
        code += "threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); made += 1\n"
        code += "except RuntimeError: print('no more', flush=True)"
        assert caller.run(code, seconds=200, processes=10, memory_mb=4096)["stdout"] == "no more\n"

    def test_memory(self, caller: Caller) -> None:
        result = caller.run("hoard = []\nwhile True: hoard.append(bytearray(1 << 24))", seconds=200)
        assert not result["ok"] and "MemoryError" in result["stderr"]

    def test_output(self, caller: Caller) -> None:
        result = caller.run("while True: print('x' * 10000)", output_bytes=5000, seconds=200)
        assert (result["stdout"], result["why"]) == ("x" * 5000, "more than 5000 bytes of output")
        result = caller.run("import sys\nwhile True: sys.stderr.write('y' * 100)", output_bytes=500, seconds=200)
        assert (result["stderr"], result["why"]) == ("y" * 500, "more than 500 bytes of output")

    def test_disk(self, caller: Caller) -> None:
        code = "with open('big', 'wb') as f:\n  while True: f.write(bytes(1 << 20)); f.flush()"
        result = caller.run(code, disk_mb=2, seconds=200)
        assert not result["ok"] and "OSError" in result["stderr"]
        if caller.level == "namespaces":  # elsewhere only each file is limited, as said
            code = "for n in range(1000):\n  with open(f'f{n}', 'wb') as f: f.write(bytes(1 << 17))"
            assert "No space left" in caller.run(code, disk_mb=2, seconds=200)["stderr"]

    def test_directories_that_resist(self, caller: Caller) -> None:
        code = "import os\nfor n in range(900):\n  os.mkdir('deep')\n"  # deeper than a path is long
        code += "  if n % 100 == 0: os.mkdir('shut', 0); os.symlink('/', 'link')\n  os.chdir('deep')"
        assert caller.run(code, seconds=200)["ok"]  # and `unharmed` finds nothing of it


class TestAProgramThatAttacks:
    def test_files_outside(self, caller: Caller, open_folder: Path) -> None:
        code = f"""
import os, shutil, sys
folder, file = {str(open_folder)!r}, {str(open_folder / "precious")!r}
def attempt(what, *arguments, **more):
    try: what(*arguments, **more)
    except OSError: return
    print(what, arguments)
attempt(open, file, "w"); attempt(open, file, "a"); attempt(open, file); attempt(os.open, file, os.O_TRUNC)
attempt(os.truncate, file, 0); attempt(os.unlink, file); attempt(os.rename, file, file + "2")
attempt(os.rename, file, "mine"); attempt(os.link, file, "mine"); attempt(os.chmod, file, 0); attempt(os.utime, file)
attempt(os.chmod, folder, 0); attempt(os.mkdir, folder + "/new"); attempt(os.symlink, "/", folder + "/link")
attempt(open, folder + "/new", "w"); attempt(os.listdir, folder); attempt(shutil.move, "main.py", folder)
os.symlink(file, "way"); attempt(open, "way", "w"); attempt(os.setxattr, file, "user.a", b"b")
for place in ("/", "/usr", "/etc", "/dev", "/dev/shm", "/var/tmp", "/run", sys.prefix, sys.base_prefix, os.__file__):
    attempt(open, place + "/moesaic-was-here", "w"); attempt(open, place, "a")
attempt(os.mkfifo, folder + "/pipe"); attempt(open, "/proc/self/mem")
"""
        before = (open_folder / "precious").stat()
        result = caller.run(code)
        assert (result["stdout"], result["stderr"]) == ("", "")
        assert [path.name for path in open_folder.iterdir()] == ["precious"]
        after = (open_folder / "precious").stat()
        assert (open_folder / "precious").read_text() == "precious"
        assert (after.st_mode, after.st_mtime_ns, after.st_ino) == (before.st_mode, before.st_mtime_ns, before.st_ino)

    def test_files_of_the_caller(self, caller: Caller) -> None:
        own = caller.folder.parent / "own"
        own.write_text("weights")
        own.chmod(0o600)
        os.chown(own, *[Path(f"/proc/{caller.process.pid}").stat().st_uid] * 2)
        code = (
            f"for mode in ('r', 'w', 'a', 'r+'):\n  try: print(open({str(own)!r}, mode).read())\n  except OSError: pass"
        )
        result = caller.run(code)
        assert result["ok"] and result["stdout"] == ""
        assert own.read_text() == "weights"

    def test_secrets(self, caller: Caller) -> None:
        code = f"""
import glob, os
texts = [repr(os.environ)]
for path in ["/proc/{caller.process.pid}/environ", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
    try: texts.append(open(path, "rb").read().decode(errors="replace"))
    except OSError: pass
print("".join(texts))
"""
        result = caller.run(code)
        assert result["ok"] and SECRET not in result["stdout"] and "SECRET" not in result["stdout"]
        environment = Path(f"/proc/{caller.process.pid}/environ").read_text()
        assert SECRET in environment  # it was there to be found

    def test_network(self, caller: Caller, open_folder: Path) -> None:
        path, name = str(caller.folder.parent / "s"), f"\0moesaic-{os.getpid()}"
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.socket(socket.AF_UNIX) as in_folder,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            in_folder.bind(path)
            os.chmod(path, 0o777)
            abstract.bind(name)
            code = f"""
import socket
inet, unix = socket.AF_INET, socket.AF_UNIX
for family, where in ((inet, {server.getsockname()!r}), (unix, {path!r}), (unix, {name!r})):
    try:
        with socket.socket(family) as s:
            s.connect(where)
            print("connected to", where)
    except OSError as error: print("no")
"""
            for listener in (in_folder, abstract):
                listener.listen()
            try:
                assert caller.run(code)["stdout"] == "no\nno\nno\n"
                for listener in (server, in_folder, abstract):
                    listener.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        listener.accept()
                exec(
                    code.replace('print("connected', '0 and print("connected').replace('print("no")', "raise")
                )  # we can
            finally:
                os.unlink(path)

    def test_signals(self, caller: Caller) -> None:
        code = f"""
import os, signal
for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP, signal.SIGKILL):
    for target in (os.getppid(), 1, {caller.process.pid}, {os.getpid()}):
        try: os.kill(target, sent)
        except OSError: pass
print("still here")
"""
        assert caller.run(code)["stdout"] == "still here\n"

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
    def test_signals_to_everybody(self, caller: Caller, name: str) -> None:
        code = f"import os, signal, time\nfor t in (0, -1): os.kill(t, signal.{name})\ntime.sleep(100)"
        assert not caller.run(code, seconds=0.5)["ok"]

    def test_signals_by_way_of_a_pipe(self, caller: Caller) -> None:
        code = f"""
import fcntl, os
read, write = os.pipe()
fcntl.fcntl(read, 8, {caller.process.pid})
"""
        assert not caller.run(code)["ok"]

    def test_limits_of_others(self, caller: Caller) -> None:
        code = f"import resource; resource.prlimit({caller.process.pid}, resource.RLIMIT_CPU, (0, 0))"
        assert not caller.run(code)["ok"]
        assert caller.run("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))")["stdout"] == "(0, 0)\n"
        assert not caller.run("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")["ok"]

    def test_privileges(self, caller: Caller) -> None:
        code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert os.getuid() != 0 and os.geteuid() != 0
for name, arguments in {
    "setuid": (0,), "unshare": (0x10000000,), "mount": (b"none", b"/", b"tmpfs", 0, b""), "chroot": (b".",),
    "ptrace": (16, os.getppid(), 0, 0), "setns": (0, 0), "umount2": (b"/", 2), "sethostname": (b"a", 1),
}.items():
    assert getattr(libc, name)(*arguments) < 0, name
try: flags = [line for line in open("/proc/self/status") if line.startswith("CapEff")]
except OSError: flags = []
assert not any(int(line.split()[1], 16) for line in flags)
print("nothing")
"""
        result = caller.run(code)
        assert (result["stdout"], result["stderr"]) == ("nothing\n", "")

    def test_processes_that_stay(self, caller: Caller) -> None:
        marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
        code = f"""
import subprocess, sys
for new in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "{marker}"], start_new_session=new)
print("started")
"""
        result = caller.run(code)
        assert result["stdout"] == ("started\n" if caller.level == "namespaces" else "")
        assert running(marker) == []


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_program_dies_with_the_caller(user: str, level: str) -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    # The program becomes one that can be found by its command line.
    code = (
        f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(300)', '{marker}'])"
    )
    with public_folder() as folder:
        caller = Caller(user, level, folder / "temporary")
        caller.start(code, seconds=200)
        until(lambda: running(marker) != [])
        caller.close()
        until(lambda: running(marker) == [] and list(caller.folder.iterdir()) == [])
