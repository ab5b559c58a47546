"""One headless Chromium for all windows of a process, spoken to by the DevTools protocol over two pipes.

It is started when a page is first shown, and again when it has died. Nothing that a page does reaches anything but the
site that its window was opened on: requests are answered by us (`chromium_window.py`), names resolve to nothing, the
proxy does not exist, and where the machine allows it the browser lives in a network with nothing in it. Any thread may
send; one thread reads, and hands what comes to the queue of the tab that it is about.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.worlds.jail import separate_uid

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEEPER = Path(__file__).with_name("_keep_chromium.py")
STARTING = 180.0  # seconds, on a machine that is very busy
MOST_MESSAGE = 8 << 20  # bytes; no page makes us hold more
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-sync",
    "--mute-audio",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-default-apps",
    "--disable-breakpad",
    "--no-default-browser-check",
    "--disable-client-side-phishing-detection",
    "--disable-domain-reliability",
    "--disable-features=HttpsUpgrades,MediaRouter,OptimizationHints,Translate,DialMediaRouteProvider,WebRtcHideLocalIps",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--blink-settings=imagesEnabled=false",
    "--window-size=1024,768",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


class BrowserGone(Exception):
    """The browser has ended, or does not answer any more."""


@cache
def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    def __init__(self) -> None:
        found = find_chromium()
        if found is None:
            remedy = "Install one (apt-get install chromium), or take browser: text, which shows the same pages."
            raise UserError("browser", "there is no Chromium on this machine", remedy)
        self.profile = tempfile.mkdtemp(prefix="moesaic-chromium-")
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        uid = separate_uid() if os.geteuid() == 0 else 0
        words = [
            sys.executable,
            "-I",
            "-S",
            str(KEEPER),
            str(read_commands),
            str(write_answers),
            self.profile,
            str(uid),
        ]
        try:
            self.keeper = subprocess.Popen(
                [*words, found, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_commands, write_answers),
                start_new_session=True,
            )
        finally:
            os.close(read_commands)
            os.close(write_answers)
        self.alive = True
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}  # by the number of a command
        self._tabs: dict[str, queue.Queue[dict[str, Any]]] = {}  # by the session of a tab: events
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()
        try:
            self.ask("Browser.getVersion", seconds=STARTING)
        except BrowserGone:
            self.end()
            raise UserError("browser", f"{found} does not start", "Take browser: text.") from None

    def send(
        self, method: str, session: str | None, to: queue.Queue[dict[str, Any]] | None = None, **options: Any
    ) -> int:
        """Without waiting; an answer, if somebody wants it, comes to the queue `to`."""
        with self._lock:
            if not self.alive:
                raise BrowserGone(method)
            self._number += 1
            number = self._number
            if to is not None:
                self._waiting[number] = to
            message = {"id": number, "method": method, "params": options} | ({"sessionId": session} if session else {})
            try:
                _write_all(self._commands, json.dumps(message).encode() + b"\0")
            except OSError:
                self.alive = False
                raise BrowserGone(method) from None
        return number

    def ask(self, method: str, seconds: float = 10.0, **options: Any) -> dict[str, Any]:
        """Of the browser itself, not of a tab."""
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.send(method, None, answers, **options)
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise BrowserGone(method) from None
        if "result" not in answer:
            raise BrowserGone(f"{method}: {answer.get('error')}")
        return dict(answer["result"])

    def answers(self) -> bool:
        try:
            self.ask("Browser.getVersion")
        except BrowserGone:
            return False
        return True

    def listen(self, session: str, events: queue.Queue[dict[str, Any]]) -> None:
        with self._lock:
            self._tabs[session] = events

    def forget(self, session: str) -> None:
        with self._lock:
            self._tabs.pop(session, None)

    def end(self) -> None:
        """At once, with everything it has started."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.keeper.pid, signal.SIGKILL)
        self.keeper.wait()
        shutil.rmtree(self.profile, ignore_errors=True)
        with self._lock:
            if self._commands >= 0:
                os.close(self._commands)
                self._commands = -1

    def _read(self) -> None:
        held = bytearray()
        while True:
            try:
                chunk = os.read(self._answers, 1 << 16)
            except OSError:
                chunk = b""
            if not chunk or len(held) > MOST_MESSAGE:
                break
            held += chunk
            while (end := held.find(b"\0")) >= 0:
                message = json.loads(held[:end])
                del held[: end + 1]
                self._hand_out(message)
        self.alive = False
        os.close(self._answers)
        with self._lock:
            for waiting in (*self._waiting.values(), *self._tabs.values()):
                waiting.put({"gone": True})

    def _hand_out(self, message: dict[str, Any]) -> None:
        with self._lock:
            to = self._waiting.pop(message["id"], None) if "id" in message else None
            if to is None:
                to = self._tabs.get(message.get("sessionId", ""))
        if to is not None:
            to.put(message)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


_shared: Chromium | None = None
_process = 0
_starting = threading.Lock()


def shared_chromium() -> Chromium:
    """The browser of this process; a new one if it has died."""
    global _shared, _process
    with _starting:
        if _shared is None or not _shared.alive or _process != os.getpid():
            if _shared is not None and _process == os.getpid():
                _shared.end()
            _shared, _process = Chromium(), os.getpid()
        return _shared


@atexit.register
def end_shared() -> None:
    global _shared
    with _starting:
        if _shared is not None and _process == os.getpid():
            _shared.end()
        _shared = None
