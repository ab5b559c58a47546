"""Structured outputs: a JSON schema, regular expression, grammar or choice, by llguidance."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.grammars.gbnf import gbnf_to_lark, is_gbnf
from moesaic.serve.core.grammars.lark import WHITESPACE, Rules, quoted, regex_parts
from moesaic.serve.core.grammars.unique_keys import KeyReader, QuoteTokens

NO_TEXT = ("NoExtension", "NoExtensionBias")  # why a matcher stops that can go nowhere


@dataclass(frozen=True)
class Grammar:
    """`text` is llguidance's own form of the grammar; the class methods make one from what users have. `place` is what
    they call it, for the case that something is wrong with it. With `unique_keys` no JSON object gets a key twice;
    what was read before one of the `resets` was no JSON."""

    text: str
    place: str = "grammar"
    unique_keys: bool = False
    resets: tuple[str, ...] = ()

    @classmethod
    def json(
        cls,
        schema: Any = None,
        place: str = "json_schema",
        *,
        whitespace: str = WHITESPACE,
        compact: bool = False,
    ) -> Grammar:
        """JSON that satisfies a schema; any JSON object without one. `whitespace` may stand between its parts, or,
        where it is to be `compact`, none."""
        rules = Rules(options=json_options(whitespace, compact))
        found = rules.schema(schema if schema is not None else {"type": "object"}, place)
        try:
            return cls.of(rules, found, place)
        except UserError as error:
            if "oneOf" not in error.problem:
                raise
        # Which of the alternatives it is cannot be told from the text: then any of them.
        rules = Rules(options=json_options(whitespace, compact) | {"coerce_one_of": True})
        return cls.of(rules, rules.schema(schema, place), place)

    @classmethod
    def regex(cls, pattern: str, place: str = "regex") -> Grammar:
        return cls._checked(regex_parts(pattern), place)

    @classmethod
    def lark(cls, grammar: str, place: str = "grammar") -> Grammar:
        return cls._checked([{"lark_grammar": grammar}], place)

    @classmethod
    def gbnf(cls, grammar: str, place: str = "grammar") -> Grammar:
        """llama.cpp's notation, and xgrammar's EBNF, which has the same words."""
        return cls.lark(gbnf_to_lark(grammar, place), place)

    @classmethod
    def written(cls, grammar: str, place: str = "grammar") -> Grammar:
        """In whichever notation it is written."""
        return cls.gbnf(grammar, place) if is_gbnf(grammar) else cls.lark(grammar, place)

    @classmethod
    def choice(cls, options: list[str], place: str = "choice") -> Grammar:
        if not options:
            raise UserError(place, "is empty", "Give at least one option.")
        return cls.lark("start: " + " | ".join(quoted(option) for option in options), place)

    @classmethod
    def of(cls, rules: Rules, start: str, place: str, resets: tuple[str, ...] = ()) -> Grammar:
        return cls._checked(rules.text(start), place, rules.open, resets)

    @classmethod
    def _checked(
        cls, parts: list[dict[str, Any]], place: str, unique_keys: bool = False, resets: tuple[str, ...] = ()
    ) -> Grammar:
        from llguidance import LLMatcher

        text = json.dumps({"grammars": parts}, ensure_ascii=False)
        try:
            problem = LLMatcher.validate_grammar(text)
        except Exception as error:  # the library raises whatever its parser stumbled over
            problem = str(error)
        if problem:
            raise UserError(place, f"cannot be followed ({reason(problem)})", "Correct it.")
        return cls(text, place, unique_keys, resets)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """For a grammar that has this one within it."""
        found: list[dict[str, Any]] = json.loads(self.text)["grammars"]
        return found

    def matcher(self, tokenizer: Tokenizer | None, vocab: int, stop_tokens: set[int]) -> Matcher:
        assert tokenizer is not None
        return Matcher(self, tokenizer, vocab, stop_tokens)


def json_options(whitespace: str, compact: bool) -> dict[str, Any]:
    return {"whitespace_flexible": False} if compact else {"whitespace_pattern": whitespace}


class Matcher:
    """The state of one request in its grammar."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, vocab: int, stop_tokens: set[int]) -> None:
        self.vocab = vocab
        self.stop_tokens = stop_tokens
        self.tokenizer = tokenizer
        self.keys = KeyReader(grammar.resets) if grammar.unique_keys else None
        self.inner = compiled(grammar.text, tokenizer, vocab).deep_copy()
        beginnings = 0 if self.inner.is_error() else self._allowed().sum()
        if self.inner.is_error() and self.inner.stop_reason() not in NO_TEXT:
            raise UserError(grammar.place, f"cannot be followed ({reason(self.inner.get_error())})", "Correct it.")
        if not beginnings:
            raise UserError(grammar.place, "no text satisfies it", "Correct it.")

    def mask(self, logits_V: Tensor) -> Tensor:
        """Logits of the tokens that may come next, minus infinity elsewhere."""
        allowed_V = self._allowed()
        if self.keys is not None:
            repeated = self.keys.duplicates(quote_tokens(self.tokenizer, self.vocab), allowed_V)
            # Where only keys that are there already fit, one comes twice: better than no answer.
            if repeated and allowed_V.sum() > len(set(repeated)):
                allowed_V[repeated] = False
        return logits_V.masked_fill(torch.from_numpy(~allowed_V).to(logits_V.device), float("-inf"))

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        bits = allocate_token_bitmask(1, self.vocab)
        fill_next_token_bitmask(self.inner, bits, 0)
        return np.unpackbits(bits[0].view(np.uint8), bitorder="little")[: self.vocab].astype(bool)

    def accept(self, token: int) -> None:
        if token not in self.stop_tokens:
            self.inner.consume_token(token)
            if self.keys is not None:
                self.keys.feed(token_bytes(self.tokenizer, self.vocab, token))

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.inner.is_stopped())


@lru_cache(maxsize=32)
def compiled(text: str, tokenizer: Tokenizer, vocab: int) -> Any:
    """A grammar that no text has gone through yet; many requests have the same."""
    from llguidance import LLMatcher, LLParserLimits

    # Every step of the engine waits for the masks: less may be spent on one than the library would.
    limits = LLParserLimits(step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False)
    return LLMatcher(llguidance_tokenizer(tokenizer, vocab), text, log_level=0, limits=limits)


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


def token_bytes(tokenizer: Tokenizer, vocab: int, token: int) -> bytes:
    return bytes(llguidance_tokenizer(tokenizer, vocab).decode_bytes([token]))


@lru_cache(maxsize=4)
def quote_tokens(tokenizer: Tokenizer, vocab: int) -> QuoteTokens:
    return QuoteTokens(token_bytes(tokenizer, vocab, token) for token in range(vocab))


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer, vocab: int) -> Mapping[str, int]:
    """Tokens that are no text for a grammar, by what they look like."""
    inner = llguidance_tokenizer(tokenizer, vocab)
    added = tokenizer.fast.get_added_tokens_decoder()
    return {
        token.content: number for number, token in added.items() if number < vocab and inner.is_special_token(number)
    }


def prepare_grammars(tokenizer: Tokenizer | None, vocab: int) -> None:
    """Warm up what the first structured output would wait for. Where that fails, the request itself will report why."""
    if tokenizer is not None:
        with contextlib.suppress(BaseException):  # the library panics where it cannot read a tokenizer
            llguidance_tokenizer(tokenizer, vocab)
