"""Text to tokens and back, and a conversation to the text a model was trained on. Reads tokenizer.json."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as FastTokenizer

from moesaic.errors import UserError
from moesaic.json_files import object_or_empty
from moesaic.model.chat_template import Refused, compiled
from moesaic.model.template_abilities import takes_tools, wants_arguments_as_text

MOST_TEMPLATES = 8  # compiled at a time: a server may take them from requests
CONTINUES = "THE_COMPLETION_CONTINUES_HERE "  # stands at the end of a message while it is rendered
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # as chat templates call them


class Tokenizer:
    """`files` are the tokenizer's files as they stand in a model directory, carried from stage to stage unchanged."""

    no_template = "the model has no chat template"  # what is said where one is wanted

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
            # Some files, those of sentence-transformers, would cut and fill up every text; nobody asked for that.
            fast.no_truncation()
            fast.no_padding()
            fast.encode("a")  # some parts that do not fit together show only in use
        except BaseException as error:  # the library raises plain Exception, and its panics are not even that
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            problem = f"cannot be read ({str(error)[:200]!r})"
            raise UserError(place / "tokenizer.json", problem, "Copy the file again.") from None
        return cls(fast, files, place)

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles its own template: it is a program, and programs do not travel."""
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    def __len__(self) -> int:
        return self.fast.get_vocab_size(with_added_tokens=True)

    def same_tokens(self, other: Tokenizer) -> bool:
        """Whether every token has the same number in both; as many tokens are not enough."""
        return bool(self.fast.get_vocab() == other.fast.get_vocab())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds what the tokenizer puts around every text (a beginning token, for some)."""
        try:
            # As a batch of one: that lets other threads run meanwhile, and a long text takes seconds. The fast kind
            # leaves out where in the text each token is.
            return list(self.fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except TypeError:
            raise UserError("text", "is not Unicode (it holds half of a surrogate pair)", "Correct it.") from None

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self.fast.decode(list(tokens), skip_special_tokens=not special))

    def special(self, name: str) -> str | None:
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Those that decoding skips."""
        added = self.fast.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)

    @cached_property
    def chat_template(self) -> str | None:
        if "chat_template.jinja" in self.files:
            return self.files["chat_template.jinja"].decode("utf-8", "replace")
        template = self.settings.get("chat_template")
        template = self._named_templates.get("default") if isinstance(template, list) else template
        return template if isinstance(template, str) else None

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools: some models have one of their own."""
        template = None if "chat_template.jinja" in self.files else self._named_templates.get("tool_use")
        return template if isinstance(template, str) else self.chat_template

    @property
    def _named_templates(self) -> dict[Any, Any]:
        several = self.settings.get("chat_template")
        entries = several if isinstance(several, list) else ()
        return {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}

    def with_template(self, text: str) -> Tokenizer:
        """The same with another chat template."""
        return Tokenizer(self.fast, self.files | {"chat_template.jinja": text.encode()}, self.place)

    @cached_property
    def takes_tools(self) -> bool:
        return takes_tools(self.render)

    @cached_property
    def wants_arguments_as_text(self) -> bool:
        return wants_arguments_as_text(self.render)

    def chat(self, messages: Sequence[dict[str, Any]], *, reply: bool = True, **extra: Any) -> str:
        """The text of a conversation, opened for the assistant's answer if `reply`."""
        return self.render(messages, extra, reply=reply)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        extra: Mapping[str, Any],
        *,
        reply: bool = True,
        continued: bool = False,
        template: str | None = None,
    ) -> str:
        """The same, with `extra` variables. With `continued` it ends where the last message's content does. `template`
        is instead of the model's own."""
        text = template or (self.tool_template if extra.get("tools") else self.chat_template)
        if text is None:
            raise UserError(self.place, self.no_template, "Give it plain text instead.")

        special = {name: self.special(name) or "" for name in SPECIAL}
        given = {"tools": None, "documents": None, **special, **extra}  # templates ask whether these are none
        if "xml_tools" in text:  # what SmolLM3 calls them
            given.setdefault("xml_tools", given["tools"])
        if continued:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + CONTINUES}]
        try:
            shown = self._template(text).render(messages=messages, add_generation_prompt=reply, **given)
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
        return self._up_to_mark(shown) if continued else shown

    def _up_to_mark(self, shown: str) -> str:
        """As `transformers` cuts it: where a template trims what it shows, white space before the mark goes too."""
        before, mark, after = shown.rpartition(CONTINUES.strip())
        if not mark:
            problem = "the chat template does not show the last message as it is, so it cannot be continued"
            raise UserError(self.place, problem, "End with a message of the user.")
        return before if after.startswith(" ") else before.rstrip()

    def _template(self, text: str) -> Template:
        """Compiled once: that takes a hundred times as long as a short conversation."""
        kept: dict[str, Template] = self.__dict__.setdefault("_compiled", {})
        if text not in kept:
            if len(kept) >= MOST_TEMPLATES:
                kept.clear()
            kept[text] = compiled(text)
        return kept[text]


def _line(error: Exception) -> int | None:
    """Of the template: Jinja puts its lines into the traceback, under a name that no file has."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, Refused | TemplateError) else f"{type(error).__name__}: {said}"
