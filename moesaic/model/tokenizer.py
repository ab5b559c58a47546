"""Text to tokens and back, and a conversation to the text a model was trained on. Reads tokenizer.json."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as FastTokenizer

from moesaic.errors import UserError
from moesaic.json_files import object_or_empty
from moesaic.model.chat_template import Refused, compiled

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # as chat templates call them


class Tokenizer:
    """`files` are the tokenizer's files as they stand in a model directory, carried from stage to stage unchanged."""

    def __init__(self, fast: FastTokenizer, files: dict[str, bytes], place: Path) -> None:
        self.fast = fast
        self.files = files
        self.place = place
        self.settings: dict[str, Any] = object_or_empty(files.get("tokenizer_config.json"))
        generation = object_or_empty(files.get("generation_config.json"))
        eos = generation.get("eos_token_id")
        self.stop_tokens: set[int] = {t for t in (eos if isinstance(eos, list) else [eos]) if isinstance(t, int)}
        for name in ("eos_token",):
            token = self.special(name)
            if token is not None and (number := fast.token_to_id(token)) is not None:
                self.stop_tokens.add(number)

    @classmethod
    def from_files(cls, files: dict[str, bytes], place: Path) -> Tokenizer | None:
        """None for a model that came without a tokenizer."""
        if "tokenizer.json" not in files:
            return None
        try:
            fast = FastTokenizer.from_str(files["tokenizer.json"].decode())
            fast.encode("a")  # some parts that do not fit together show only in use
        except BaseException as error:  # the library raises plain Exception, and its panics are not even that
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            problem = f"cannot be read ({str(error)[:200]!r})"
            raise UserError(place / "tokenizer.json", problem, "Copy the file again.") from None
        return cls(fast, files, place)

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles its own template: it is a program, and programs do not travel."""
        return {name: value for name, value in self.__dict__.items() if name != "_template"}

    def __len__(self) -> int:
        return self.fast.get_vocab_size(with_added_tokens=True)

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether every token has the same number in both; as many tokens are not enough."""
        return bool(self.fast.get_vocab() == other.fast.get_vocab())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds what the tokenizer puts around every text (a beginning token, for some)."""
        try:
            # As a batch of one: that lets other threads run meanwhile, and a long text takes seconds.
            return list(self.fast.encode_batch([text], add_special_tokens=special)[0].ids)
        except TypeError:
            raise UserError("text", "is not Unicode (it holds half of a surrogate pair)", "Correct it.") from None

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self.fast.decode(list(tokens), skip_special_tokens=not special))

    def special(self, name: str) -> str | None:
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @cached_property
    def chat_template(self) -> str | None:
        if "chat_template.jinja" in self.files:
            return self.files["chat_template.jinja"].decode("utf-8", "replace")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def chat(self, messages: Sequence[dict[str, Any]], *, reply: bool = True, **extra: Any) -> str:
        """The text of a conversation, opened for the assistant's answer if `reply`."""
        if self.chat_template is None:
            raise UserError(self.place, "the model has no chat template", "Give it plain text instead.")

        special = {name: self.special(name) or "" for name in SPECIAL}
        given = {"tools": None, "documents": None, **special, **extra}  # templates ask whether these are none
        try:
            return self._template.render(messages=messages, add_generation_prompt=reply, **given)
        except Refused as error:
            problem = f"the chat template refuses the messages ({_one_line(error)})"
            raise UserError(self.place, problem, "Correct them.") from None
        except Exception as error:  # a template is a program, and may fail in any way a program can
            file = "chat_template.jinja" if "chat_template.jinja" in self.files else "tokenizer_config.json"
            line = f", line {found}," if (found := _line(error)) else ""
            problem = f"the chat template ({file}){line} fails on these messages ({_one_line(error)})"
            if isinstance(error, TemplateSyntaxError):
                problem = f"the chat template ({file}){line} cannot be read ({_one_line(error)})"
            raise UserError(self.place, problem, "Mend the template, or give it plain text instead.") from None

    @cached_property
    def _template(self) -> Template:
        """Compiled once: that takes a hundred times as long as a short conversation."""
        assert self.chat_template is not None
        return compiled(self.chat_template)


def _line(error: Exception) -> int | None:
    """Of the template: Jinja puts its lines into the traceback, under a name that no file has."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, Refused | TemplateError) else f"{type(error).__name__}: {said}"
