"""Structured outputs: a JSON schema, regular expression, grammar or choice, by llguidance."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. In unbounded whitespace a
# small model loops for ever.
WHITESPACE = r"( |\n[ ]{0,16})?"


@dataclass(frozen=True)
class Grammar:
    """`text` is llguidance's own form of the grammar; the class methods make one from what users have. `place` is what
    they call it, for the case that something is wrong with it."""

    text: str
    place: str = "grammar"

    @classmethod
    def json(cls, schema: dict[str, Any] | None = None, place: str = "json_schema") -> Grammar:
        """JSON that satisfies a schema; any JSON object without one."""
        from llguidance import LLMatcher

        spaces: Any = {"whitespace_pattern": WHITESPACE}
        accepted = schema if schema is not None else {"type": "object"}
        return cls._checked(lambda: LLMatcher.grammar_from_json_schema(accepted, overrides=spaces), place)

    @classmethod
    def regex(cls, pattern: str, place: str = "regex") -> Grammar:
        from llguidance import LLMatcher

        return cls._checked(lambda: LLMatcher.grammar_from_regex(pattern), place)

    @classmethod
    def lark(cls, grammar: str, place: str = "grammar") -> Grammar:
        from llguidance import LLMatcher

        return cls._checked(lambda: LLMatcher.grammar_from_lark(grammar), place)

    @classmethod
    def choice(cls, options: list[str], place: str = "choice") -> Grammar:
        if not options:
            raise UserError(place, "is empty", "Give at least one option.")
        return cls.lark("start: " + " | ".join(json.dumps(option) for option in options), place)

    @classmethod
    def _checked(cls, make: Any, place: str) -> Grammar:
        from llguidance import LLMatcher

        try:
            text = make()
            problem = LLMatcher.validate_grammar(text)
        except Exception as error:  # the library raises whatever its parser stumbled over
            problem = str(error)
        if problem:
            raise UserError(place, f"cannot be followed ({reason(problem)})", "Correct it.")
        return cls(text, place)

    def matcher(self, tokenizer: Tokenizer | None, vocab: int, stop_tokens: set[int]) -> Matcher:
        assert tokenizer is not None
        return Matcher(self, tokenizer, vocab, stop_tokens)


class Matcher:
    """The state of one request in its grammar."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, vocab: int, stop_tokens: set[int]) -> None:
        from llguidance import LLMatcher

        self.vocab = vocab
        self.stop_tokens = stop_tokens
        self.inner = LLMatcher(llguidance_tokenizer(tokenizer, vocab), grammar.text, log_level=0)
        if self.inner.is_error():
            raise UserError(grammar.place, f"cannot be followed ({reason(self.inner.get_error())})", "Correct it.")

    def mask(self, logits_V: Tensor) -> Tensor:
        """Logits of the tokens that may come next, minus infinity elsewhere."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        allowed = allocate_token_bitmask(1, self.vocab)
        fill_next_token_bitmask(self.inner, allowed, 0)
        bits_V = np.unpackbits(allowed[0].view(np.uint8), bitorder="little")[: self.vocab]
        return logits_V.masked_fill(torch.from_numpy(bits_V == 0).to(logits_V.device), float("-inf"))

    def accept(self, token: int) -> None:
        if token not in self.stop_tokens:
            self.inner.consume_token(token)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.inner.is_stopped())


def reason(problem: str) -> str:
    """What the library found wrong, without what it drew around it, its own options, and texts nobody sent."""
    lines = problem.strip().splitlines() or [""]
    # A regular expression's own problem, inside what was to be made of it.
    inner = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    first = re.sub(r"^(at )?(\d+)\((\d+)\): ", r"line \2, column \3: ", lines[0]).split(". Enable ")[0]
    return (inner or first)[:300]


@lru_cache(maxsize=4)
def llguidance_tokenizer(tokenizer: Tokenizer, vocab: int) -> Any:
    """The tokenizer in llguidance's form: made once, it reads the whole vocabulary."""
    from llguidance import LLTokenizer

    eos = min(tokenizer.stop_tokens) if tokenizer.stop_tokens else None
    return LLTokenizer(tokenizer.fast.to_str(), n_vocab=vocab, eos_token=eos)


def prepare_grammars(tokenizer: Tokenizer | None, vocab: int) -> None:
    """Warm up what the first structured output would wait for. Where that fails, the request itself will report why."""
    if tokenizer is not None:
        with contextlib.suppress(BaseException):  # the library panics where it cannot read a tokenizer
            llguidance_tokenizer(tokenizer, vocab)
