"""The sampling params of a request. Each is off by default, and has the name that most servers give it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.serve.core.grammar import Grammar

MAX_LOGPROBS = 100  # of the likeliest tokens; or all of them
GREEDY = 1e-6  # a temperature below which sampling is greedy, and logits divided by it may overflow
BREAKERS = ("\n", ":", '"', "*")  # where DRY takes a text to begin anew
MAX_BREAKER_CHARS = 512  # for each of which the whole vocabulary may be looked at

# Samplers by llama.cpp's names, in the order in which they are applied unless `samplers` says otherwise: that of
# llama.cpp, but for the temperature, which comes before the cuts as in vLLM, SGLang and transformers. Beside each the
# params it reads, which are off where `samplers` leaves it out.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "temperature": ("temperature", "dynatemp_range"),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
}
DEFAULT_ORDER = tuple(name for name in SAMPLERS if name not in ("penalties", "dry"))


@dataclass(frozen=True)
class Sampling:
    """Same seed, same text, whatever else is in the batch. docs/api/sampling.md says what each is for."""

    max_tokens: int | None = None  # None: as many as the context holds
    temperature: float = 1.0  # 0: greedy, whatever is cut
    dynatemp_range: float = 0.0  # around the temperature, by the entropy of the next token
    dynatemp_exponent: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0  # 1 or 2: instead of all cuts
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] | None = None  # the only ones to apply; cuts and temperature in this order
    repetition_penalty: float = 1.0  # over prompt and completion
    presence_penalty: float = 0.0  # over the completion
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = None  # all three over so many last tokens of both (-1: all of them)
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # -1: all
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # the engine makes token sequences of words
    allowed_tokens: frozenset[int] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # before anything may stop it
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the sampled one; -1: all
    logprob_tokens: tuple[int, ...] = ()  # report these instead of the likeliest
    processed_logprobs: bool = False  # after bias, penalties and masks, instead of the model's own
    prompt_logprobs: int | None = None  # as logprobs, of every token of the prompt
    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()  # special tokens that are part of the text, which skips others
    record_routes: bool = False
    record_draws: bool = False  # log-probabilities under temperature and truncation, and what truncation kept

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100")
        self._check("top_k", self.top_k >= 0, "must not be negative (0 keeps all)")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "must be above 0 and at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2.0 <= getattr(self, name) <= 2.0, "must be between -2 and 2")
        for name in ("min_p", "xtc_probability", "xtc_threshold"):
            self._check(name, 0.0 <= getattr(self, name) <= 1.0, "must be between 0 and 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            fine = count is None or -1 <= count <= MAX_LOGPROBS
            self._check(name, fine, f"must be between 0 and {MAX_LOGPROBS}, or -1 for all")
        if not all(self.stop):
            raise UserError("stop", "must not hold an empty string")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "must fit in 64 bits")
        self._check_rarer()
        if self.samplers is not None:
            self._switch_off(set(SAMPLERS) - set(self.samplers))
        if self.temperature < GREEDY:
            object.__setattr__(self, "temperature", 0.0)

    def _check_rarer(self) -> None:
        self._check("typical_p", 0.0 < self.typical_p <= 1.0, "must be above 0 and at most 1")
        self._check("top_n_sigma", 0.0 <= self.top_n_sigma <= 100.0, "must be between 0 and 100 (0 keeps all)")
        self._check("mirostat", self.mirostat in (0, 1, 2), "must be 0 (off), 1 or 2")
        for name in ("mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent", "dry_multiplier"):
            self._check(name, 0.0 <= getattr(self, name) <= 100.0, "must be between 0 and 100")
        self._check("dry_base", 1.0 <= self.dry_base <= 100.0, "must be between 1 and 100")
        self._check("dry_allowed_length", self.dry_allowed_length >= 1, "must be at least 1")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            count = getattr(self, name)
            self._check(name, count is None or count >= -1, "must be at least -1 (all tokens)")
        if not all(self.bad_words) or not all(self.dry_sequence_breakers):
            raise UserError("bad_words" if not all(self.bad_words) else "dry_sequence_breakers", "must not be empty")
        if sum(map(len, self.dry_sequence_breakers)) > MAX_BREAKER_CHARS:
            raise UserError("dry_sequence_breakers", f"have more than {MAX_BREAKER_CHARS} characters together")
        self._check("allowed_tokens", self.allowed_tokens is None or bool(self.allowed_tokens), "must not be empty")
        for name in self.samplers or ():
            if name not in SAMPLERS:
                raise UserError("samplers", f"there is no {name!r}", f"Known: {', '.join(SAMPLERS)}.")
        if self.record_draws and (self.dynatemp_range or self.mirostat):
            problem = "what a token was drawn from cannot be recorded at a temperature that changes"
            raise UserError("record_draws", problem, "Leave out dynatemp_range and mirostat.")

    def _check(self, name: str, fine: bool, problem: str) -> None:
        if not fine:
            raise UserError(name, f"{problem}, not {getattr(self, name)!r}")

    def _switch_off(self, samplers: set[str]) -> None:
        off = {name for sampler in samplers for name in SAMPLERS[sampler]}
        for entry in fields(self):
            if entry.name in off and entry.default is not MISSING:
                object.__setattr__(self, entry.name, entry.default)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed once from the others."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    # Asked for every token, so computed once

    @cached_property
    def plain(self) -> bool:
        """Whether it is the argmax of the unchanged logits."""
        return self.temperature == 0.0 and not self.changes_logits

    @cached_property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before a token is drawn."""
        return bool(
            self.logit_bias
            or self.penalizes
            or self.dry_multiplier
            or self.bad_words
            or self.allowed_tokens is not None
            or self.min_tokens
            or self.grammar is not None
        )

    @cached_property
    def penalizes(self) -> bool:
        some = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(some and self.repeat_last_n != 0)

    @cached_property
    def whole(self) -> bool:
        """Whether a token is drawn from all tokens, at one temperature."""
        return self.usual and not self.top_k and self.top_p >= 1.0 and self.min_p <= 0.0

    @cached_property
    def usual(self) -> bool:
        """Whether nothing cuts but top-k, top-p and min-p, after one temperature."""
        rare = self.typical_p < 1.0 or self.top_n_sigma or self.xtc_probability or self.dynatemp_range or self.mirostat
        return not rare and self.samplers is None

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """Temperature and cuts that are on, in their order."""
        on = {
            "temperature": True,
            "top_n_sigma": self.top_n_sigma > 0.0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
            "xtc": self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
        }
        if self.mirostat:
            return ("temperature", "mirostat")
        return tuple(name for name in self.samplers or DEFAULT_ORDER if on.get(name, False))

    @cached_property
    def allowed_T(self) -> Tensor | None:
        return None if self.allowed_tokens is None else torch.tensor(sorted(self.allowed_tokens))
