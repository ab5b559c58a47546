"""`moesaic chat`: from a pipe and in a terminal, with the words the engine would say by itself."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.request import Sampling
from moesaic.serve.terminal import Left, Screen, TerminalChat
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

CHAT = [sys.executable, "-m", "moesaic", "chat"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("model") / "talker", context=4096)


@pytest.fixture(scope="module")
def engine(directory: Path) -> moesaic.Engine:
    return moesaic.Engine(moesaic.load(directory))


@pytest.fixture
def chat(engine: moesaic.Engine) -> TerminalChat:
    return TerminalChat(engine, Screen(io.StringIO(), io.StringIO()), Sampling(temperature=0.0, max_tokens=12))


def said(chat: TerminalChat) -> str:
    assert isinstance(chat.screen.out, io.StringIO)
    return chat.screen.out.getvalue()


def noted(chat: TerminalChat) -> str:
    assert isinstance(chat.screen.notes, io.StringIO)
    return chat.screen.notes.getvalue()


def expected(engine: moesaic.Engine, messages: list[str], system: str = "", **sampling: object) -> list[str]:
    """What the engine answers to a conversation, turn by turn."""
    assert engine.tokenizer is not None
    turns = [{"role": "system", "content": system}] if system else []
    answers = []
    for message in messages:
        turns.append({"role": "user", "content": message})
        prompt = engine.tokenizer.encode(engine.tokenizer.chat(turns), special=False)
        [answer] = engine.generate([prompt], **{"temperature": 0.0, "max_tokens": 12, **sampling})
        answers.append(answer.text)
        turns.append({"role": "assistant", "content": answer.text})
    return answers


def test_a_pipe_is_one_message_a_line(directory: Path, engine: moesaic.Engine) -> None:
    command = [*CHAT, str(directory), "--temperature", "0", "--max-tokens", "12", "--system", "Count."]
    done = subprocess.run(
        command, input="The number 1\n\nThe number 2\n", capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in expected(engine, ["The number 1", "The number 2"], "Count."))
    assert (
        len(re.findall(r"\[12 tokens, [\d.]+ tokens/s, first token after [\d.]+ s, max-tokens reached\]", done.stderr))
        == 2
    )


def test_a_mistake_in_a_pipe_ends_it(directory: Path) -> None:
    done = subprocess.run(
        [*CHAT, str(directory)], input="/temprature 0\nhello\n", capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moesaic chat: /temprature: no such command; did you mean temperature?")


def test_a_line_that_is_not_utf8_is_told_whatever_the_encoding(directory: Path) -> None:
    command = [*CHAT, str(directory), "--temperature", "0", "--max-tokens", "2"]
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        said = {"input": b"hello\r\nhe\xffllo\n", "env": {**os.environ, "PYTHONIOENCODING": encoding}}
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, **said)  # type: ignore[call-overload]
        assert done.returncode == 2 and done.stderr.count(b"[2 tokens") == 1  # the line before it was answered
        assert b"moesaic chat: standard input, line 2: is not UTF-8 text." in done.stderr


def test_closed_input_is_an_empty_one(directory: Path) -> None:
    words = " ".join(shlex.quote(word) for word in [*CHAT, str(directory)])
    done = subprocess.run(["bash", "-c", f"{words} <&-"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Terminal:
    """A program that believes a person sits before it."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.seen = ""

    def read(self) -> None:
        if select.select([self.master], [], [], 0.5)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")

    def settle(self) -> None:
        """Wait until nothing more is shown for a while: the program listens then."""
        for _ in range(120):
            before = self.seen
            self.read()
            self.read()
            if self.seen == before:
                return

    def until(self, text: str) -> str:
        """Everything shown up to and with some text."""
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} has not come; seen: {self.seen[-500:]!r}"
            self.read()
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(2)


@pytest.fixture
def terminal(directory: Path) -> Iterator[Terminal]:
    terminal = Terminal(*CHAT, str(directory), "--temperature", "0")
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.master)


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.until("Ctrl-D quits.")
    terminal.until("> ")
    terminal.settle()
    terminal.interrupt()  # at the prompt it leaves nothing
    terminal.until("> ")
    terminal.settle()
    terminal.type("The number 7 is\n")
    terminal.until("The number 7 is\r\n")
    while not terminal.seen:  # it is writing then
        terminal.read()
    terminal.interrupt()
    shown = terminal.until("stopped")
    assert re.search(r"\[\d+ tokens?.*stopped$", shown)
    terminal.until("> ")
    terminal.type("/max-tokens 3\n")
    terminal.until("> ")
    terminal.type("/agian\n")
    terminal.until("did you mean again?")
    terminal.type("/again\n")
    terminal.until("[3 tokens")
    terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(PATIENCE) == 0


def test_commands_change_what_is_asked(chat: TerminalChat, engine: moesaic.Engine) -> None:
    chat.take("/system Count.")
    chat.take("/max-tokens 5")
    chat.take("The number 3")
    [with_system] = expected(engine, ["The number 3"], "Count.", max_tokens=5)
    assert said(chat) == f"{with_system}\n"
    chat.take("/again")
    assert said(chat) == f"{with_system}\n" * 2
    assert len(chat.turns) == 2
    chat.take("/reset")
    chat.take("/system")
    chat.take("//slash")
    assert chat.turns[0]["content"] == "/slash"
    assert said(chat).endswith(expected(engine, ["/slash"], max_tokens=5)[0] + "\n")


def test_settings_are_shown_and_checked(chat: TerminalChat) -> None:
    for line in ("/temperature 0.5", "/top-p 0.9", "/seed 4", "/max-tokens", "/settings"):
        chat.take(line)
    assert "temperature 0.5, top-p 0.9, max-tokens context, seed 4" in noted(chat)
    for wrong in ("/temperature hot", "/temperature -1", "/top-p 2", "/seed 1.5", "/nonsense", "/temperature"):
        with pytest.raises(UserError):
            chat.take(wrong)
    assert chat.sampling == Sampling(temperature=0.5, top_p=0.9, seed=4)
    chat.take("/set dry_multiplier 0.8")
    chat.take("/set bad_words foo,bar")
    chat.take("/settings")
    assert "seed 4, dry_multiplier 0.8, bad_words ('foo', 'bar')" in noted(chat)
    for wrong in ("/set", "/set min_q 1", "/set min_p", "/set min_p 2", "/set grammar x", "/set mirostat 1.5"):
        with pytest.raises(UserError):
            chat.take(wrong)
    assert (chat.sampling.dry_multiplier, chat.sampling.bad_words) == (0.8, ("foo", "bar"))
    with pytest.raises(Left):
        chat.take("/quit")
    chat.take("/help")
    assert "/max-tokens N" in noted(chat)


def test_too_long_a_message_is_refused_and_forgotten(chat: TerminalChat, engine: moesaic.Engine) -> None:
    with pytest.raises(UserError, match="/reset"):
        chat.take("number " * 5000)
    assert chat.turns == []
    with pytest.raises(UserError, match="there is no message yet"):
        chat.take("/again")
    chat.take("The number 3")
    assert said(chat) == expected(engine, ["The number 3"])[0] + "\n"
    assert engine.scheduler.requests == {}


def test_reasoning_is_shown_and_not_remembered(chat: TerminalChat, monkeypatch: pytest.MonkeyPatch) -> None:
    [plain] = expected(chat.engine, ["The number 3"])
    opened = chat.tokenizer.chat
    monkeypatch.setattr(chat.tokenizer, "chat", lambda turns: opened(turns) + "<think>\n")
    chat.take("The number 3")
    assert said(chat).strip()
    assert chat.turns[-1] == {"role": "assistant", "content": ""}  # all of it was thought
    assert plain


def test_a_model_cannot_take_over_the_terminal() -> None:
    screen = Screen(io.StringIO(), io.StringIO(), styled=True)
    screen.write("a\x1b]0;title\x07b\x9b2J\tc\n")
    screen.write("faint", faint=True)
    assert isinstance(screen.out, io.StringIO)
    assert screen.out.getvalue() == "a�]0;title�b�2J\tc\n\x1b[2mfaint\x1b[0m"
