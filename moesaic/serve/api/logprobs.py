"""Log-probabilities as OpenAI's and vLLM's APIs write them: tokens as text and bytes (one may be half a character)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.schema.chat import ChatTokenLogprob, TopLogprob
from moesaic.serve.api.schema.tokens import TokenFields
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampling import Sampling
from moesaic.serve.core.text import MARKERS

BYTE_TEXT = "bytes:"  # how OpenAI writes a token that is no whole characters
MAX_ENTRIES = 1 << 20  # positions times vocabulary, where the log-probabilities of all tokens are asked for
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Shown(NamedTuple):
    """What a client wants to see of a token's log-probability: of the likeliest `top` (-1: all), or of the tokens it
    `given`; tokens as text or as numbers."""

    top: int
    given: bool = False
    as_ids: bool = False

    @classmethod
    def of(cls, body: TokenFields, top: int) -> Shown:
        return cls(top, bool(body.logprob_token_ids), bool(body.return_tokens_as_token_ids))

    def others(self, chosen: TokenLogprob) -> Sequence[tuple[int, float]]:
        """With given tokens, the chosen one is among them, as in vLLM."""
        if not self.given:
            return chosen.top if self.top == -1 else chosen.top[: self.top]
        missing = all(token != chosen.token for token, _ in chosen.top)
        return [(chosen.token, chosen.logprob), *chosen.top] if missing else chosen.top


class TokenDecoder:
    """Single tokens as text and bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        if token not in self._cache:
            self._cache[token] = self._decode(token)
        return self._cache[token]

    def text(self, token: int) -> str:
        """As OpenAI writes it: a token that is no whole characters is written as its bytes."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return BYTE_TEXT + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_skipped(self, token: int) -> bool:
        """Whether a token is a special one that is left out of texts, because it only starts, ends or divides them."""
        added = self._added.get(token)
        return added is not None and added.special and added.content not in MARKERS

    def logprob(self, chosen: TokenLogprob, shown: Shown) -> ChatTokenLogprob:
        return ChatTokenLogprob(
            **self._entry(chosen.token, chosen.logprob, shown).model_dump(),
            top_logprobs=[self._entry(token, logprob, shown) for token, logprob in shown.others(chosen)],
        )

    def name(self, token: int, as_id: bool) -> str:
        return f"token_id:{token}" if as_id else self.text(token)

    def _entry(self, token: int, logprob: float, shown: Shown) -> TopLogprob:
        name = self.name(token, shown.as_ids)
        return TopLogprob(token=name, logprob=finite(logprob), bytes=list(self.bytes_of(token)))

    def _decode(self, token: int) -> bytes:
        piece = self.tokenizer.fast.id_to_token(token)
        if piece is None:  # the vocabulary is padded
            return b""
        if token in self._added:
            return piece.encode()
        if self._byte_level and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if match := BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self.tokenizer.fast.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.fast.to_str()).get("decoder"))


def prompt_logprobs(request: Request, decoder: TokenDecoder) -> list[dict[str, Any] | None] | None:
    """Each token of the prompt and the likeliest in its place, as vLLM writes them; the first token has none."""
    if request.sampling.prompt_logprobs is None:
        return None

    def entry(chosen: TokenLogprob) -> dict[str, Any]:
        ranks = {chosen.token: chosen.rank} | {token: rank for rank, (token, _) in enumerate(chosen.top, 1)}
        logprobs = dict(chosen.top) | {chosen.token: chosen.logprob}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks[token],
                "decoded_token": decoder.text(token),
            }
            for token, logprob in logprobs.items()
        }

    return [None if chosen is None else entry(chosen) for chosen in request.prompt_logprobs]


def check_entries(body: TokenFields, sampling: Sampling, prompt: int, vocab: int) -> None:
    """Whether the log-probabilities of the whole vocabulary, where they are asked for, can be sent."""
    for name, asked, positions in (
        ("logprobs", sampling.logprobs, sampling.max_tokens),
        ("prompt_logprobs", sampling.prompt_logprobs, prompt),
    ):
        if asked == -1 and (positions is None or positions * vocab > MAX_ENTRIES):
            place = "top_logprobs" if name == "logprobs" and hasattr(body, "top_logprobs") else name
            what = "max_tokens" if name == "logprobs" else "the prompt"
            problem = f"-1 is the whole vocabulary of {vocab}, of which this server writes {MAX_ENTRIES} entries"
            raise UserError(place, problem, f"Limit {what} to {MAX_ENTRIES // vocab} tokens, or ask for 100.")


def check_given(body: TokenFields, logprobs: int | None, max_tokens: int | None) -> tuple[int, ...]:
    """The tokens whose log-probabilities are asked for."""
    if not body.logprob_token_ids:
        return ()
    if logprobs is None:
        raise UserError("logprob_token_ids", "needs logprobs")
    if getattr(body, "use_beam_search", None):
        raise UserError("logprob_token_ids", "cannot be reported with beam search", "Leave one out.")
    if max_tokens == 0:
        raise UserError("logprob_token_ids", "is of generated tokens, and none are generated", "Raise max_tokens.")
    return tuple(dict.fromkeys(body.logprob_token_ids))


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return logprob if logprob > -9999.0 else -9999.0


def _byte_characters() -> dict[str, int]:
    """How byte-level tokenizers write bytes: the printable ones of Latin-1 as they are, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTES = _byte_characters()


TokenItem = dict[str, Any]  # a `ChatTokenLogprob`


class TokenAligner:
    """Which tokens spell a piece of text; holds those of which no piece was taken yet.

    One step may bring the end of a reasoning section, its tag and the first words of the content, and a parser may hold
    a piece back until it knows what it is.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[bytes, TokenItem | None]] = []  # None: the rest of a token that was taken already

    def add(self, tokens: list[TokenItem]) -> None:
        self._pending += [(bytes(token["bytes"] or ()), token) for token in tokens]

    def take(self, text: str, last: bool) -> tuple[list[TokenItem], list[TokenItem]] | None:
        """The tokens before a piece and those of it; None where no tokens spell it, as with broken characters.

        The `last` piece of a step is looked for at the end, where it is unless something is held back: its words may
        stand in what came before as well.
        """
        raw, piece = b"".join(part for part, _ in self._pending), text.encode()
        begin = len(raw) - len(piece) if last and raw.endswith(piece) else raw.find(piece)
        if begin < 0:
            return None
        end, at = begin + len(piece), 0
        before: list[TokenItem] = []
        own: list[TokenItem] = []
        pending: list[tuple[bytes, TokenItem | None]] = []
        for part, token in self._pending:
            start, at = at, at + len(part)
            if start >= end:
                pending.append((part, token))
                continue
            if token is not None:
                (before if at <= begin else own).append(token)
            if at > end:
                pending.append((part[end - start :], None))
        self._pending = pending
        return before, own

    def rest(self) -> list[TokenItem]:
        found, self._pending = [token for _, token in self._pending if token is not None], []
        return found
