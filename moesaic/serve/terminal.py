"""A chat in a terminal, or one prompt a line from a pipe: the engine runs in this process, without a server."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TextIO

from moesaic.errors import UserError
from moesaic.serve.core.branches import Branching
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampling_text import KINDS, sampling_value
from moesaic.serve.parsers import Content, Event, Parser, Reasoning, detect
from moesaic.strict import did_you_mean

HELP = """\
/help               list the commands
/reset              clear the conversation
/again              regenerate the last response
/system TEXT        set the system prompt; without TEXT, none
/temperature X      0 is greedy decoding
/top-p X            nucleus sampling; 1 is off
/set NAME VALUE     any other sampling param, as in /set min_p 0.05
/max-tokens N       of a response; without N, as many as the context holds
/seed N             same seed, same response; without N, random
/settings           show the settings
/quit               leave, as does Ctrl-D
Ctrl-C stops a response. A line that ends with \\ continues on the next. // starts a message with a slash."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class Screen:
    """Where responses go, and where all else goes. `styled` is for a terminal: faint notes, and no control characters,
    with which a model could take it over."""

    out: TextIO
    notes: TextIO
    styled: bool = False

    def write(self, text: str, faint: bool = False) -> None:
        shown = CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if self.styled else text
        self.out.write(f"\x1b[2m{shown}\x1b[0m" if faint and self.styled else shown)
        self.out.flush()

    def note(self, text: str) -> None:
        self.notes.write(f"\x1b[2m{text}\x1b[0m\n" if self.styled else f"{text}\n")
        self.notes.flush()


class Left(Exception):
    """The user quits."""


@dataclass
class TerminalChat:
    engine: Engine
    screen: Screen
    sampling: Sampling = field(default_factory=Sampling)
    system: str = ""
    branches: int = 1  # of a response that the model writes in parallel (APAR)
    parser: Parser = field(init=False)
    turns: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.engine.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Convert it from a directory that holds tokenizer.json.")
        self.tokenizer = self.engine.tokenizer
        self.parser = detect(self.tokenizer.chat_template)

    def take(self, line: str) -> None:
        """A line of the user's: a command or a message. Raises `Left` for /quit."""
        if line.startswith("/") and not line.startswith("//"):
            self._run_command(line)
        elif line.strip():
            self.turns.append({"role": "user", "content": line.removeprefix("/") if line[:2] == "//" else line})
            self._respond()

    # Commands

    def _run_command(self, line: str) -> None:
        name, _, text = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.screen.note(HELP),
            "reset": lambda _: self.turns.clear(),
            "again": lambda _: self._again(),
            "system": self._set_system,
            "temperature": lambda text: self._set("temperature", _number(text, float)),
            "top-p": lambda text: self._set("top_p", _number(text, float)),
            "max-tokens": lambda text: self._set("max_tokens", _number(text, int) if text else None),
            "seed": lambda text: self._set("seed", _number(text, int) if text else None),
            "set": self._set_param,
            "settings": lambda _: self._show_settings(),
            "quit": self._leave,
        }
        if name not in commands:
            raise UserError(f"/{name}", f"no such command{did_you_mean(name, commands)}", "/help lists them.")
        commands[name](text.strip())

    def _leave(self, _: str) -> None:
        raise Left

    def _set_system(self, text: str) -> None:
        self.system = text

    def _set(self, name: str, value: Any) -> None:
        self.sampling = replace(self.sampling, **{name: value})

    def _set_param(self, text: str) -> None:
        name, _, value = text.partition(" ")
        self._set(name, sampling_value(name, value.strip(), "/set"))

    def _show_settings(self) -> None:
        sampling = self.sampling
        seed = "random" if sampling.seed is None else sampling.seed
        max_tokens = "context" if sampling.max_tokens is None else sampling.max_tokens
        chosen = f"temperature {sampling.temperature}, top-p {sampling.top_p}"
        shown = ("temperature", "top_p", "max_tokens", "seed")
        others = {name: getattr(sampling, name) for name in KINDS if name not in shown}
        changed = [f", {name} {value}" for name, value in others.items() if value != getattr(Sampling(), name)]
        self.screen.note(f"{chosen}, max-tokens {max_tokens}, seed {seed}{''.join(changed)}")
        self.screen.note(f"system prompt: {self.system or 'none'}")

    def _again(self) -> None:
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if not self.turns:
            raise UserError("/again", "there is no message yet")
        self._respond()

    # Responses

    def _prompt(self) -> str:
        """The conversation by the model's chat template; without one, its plain text."""
        if self.tokenizer.chat_template is None:
            return "".join(turn["content"] for turn in self.turns)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.tokenizer.chat([*system, *self.turns])

    def _respond(self) -> None:
        try:
            text = self._prompt()
            tokens = self.tokenizer.encode(text, special=self.tokenizer.chat_template is None)
            markers = self.parser.markers(self.tokenizer, calls=False)
            request = self.engine.request(tokens, replace(self.sampling, markers=markers))
        except UserError as error:
            self.turns.pop()  # the next message must not fail by it too
            remedy = "Clear the conversation with /reset, or shorten the message."
            raise UserError(
                error.place, error.problem, remedy if error.remedy == "Shorten it." else error.remedy
            ) from None
        start = time.monotonic()
        content = "".join(self._stream(request, text))
        self.turns.append({"role": "assistant", "content": content})
        self._report(request, start)

    def _stream(self, request: Request, prompt: str) -> Iterator[str]:
        """Show a response as it is generated; yields its content, without the reasoning."""
        reader = self.parser.reader(prompt=prompt)
        branching = Branching(self.engine, request, self.branches) if self.branches > 1 else None
        running = branching.requests() if branching is not None else [request]
        for one in running:
            self.engine.add(one)
        reasoning = False

        def show(events: list[Event]) -> Iterator[str]:
            nonlocal reasoning
            for event in events:
                if isinstance(event, Reasoning):
                    self.screen.write(event.text, faint=True)
                    reasoning = True
                elif isinstance(event, Content):
                    self.screen.write(f"\n\n{event.text}" if reasoning else event.text)
                    reasoning = False
                    yield event.text

        with stopped_by_interrupt() as stopped:
            try:
                while request.finish_reason is None and not stopped():
                    for output in self.engine.step():
                        if branching is not None:
                            for one in branching.take(output):
                                running.append(one)
                                self.engine.add(one)
                            output = branching.read()
                        if output.request is request and output.text:
                            yield from show(reader.push(output.text))
            finally:
                for one in running:
                    self.engine.abort(one)
                if request.finish_reason is None:
                    request.finish_reason = "abort"
        yield from show(reader.finish())
        self.screen.write("\n")

    def _report(self, request: Request, start: float) -> None:
        ended = {"abort": ", stopped", "length": ", max-tokens reached"}.get(request.finish_reason or "", "")
        if request.first_token is None or request.last_token is None:
            self.screen.note(f"[0 tokens{ended}]")
            return
        throughput = ""
        if request.written > 1 and request.last_token > request.first_token:
            throughput = f", {(request.written - 1) / (request.last_token - request.first_token):.1f} tokens/s"
        tokens = f"{request.written} token{'s' if request.written != 1 else ''}"
        self.screen.note(f"[{tokens}{throughput}, first token after {request.first_token - start:.2f} s{ended}]")


@contextmanager
def stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that the engine is never left in the middle of a step. A second one interrupts."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(repr(text), "is not a number" if kind is float else "is not a whole number") from None
