"""Log-probabilities as OpenAI's and vLLM's APIs write them: tokens as text and bytes (one may be half a character)."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.schema.chat import ChatTokenLogprob, TopLogprob
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.text import MARKERS

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_skipped(self, token: int) -> bool:
        """Whether a token is a special one that is left out of texts, because it only starts, ends or divides them."""
        added = self._added.get(token)
        return added is not None and added.special and added.content not in MARKERS

    def logprob(self, chosen: TokenLogprob, top: int) -> ChatTokenLogprob:
        return ChatTokenLogprob(
            **self._entry(chosen.token, chosen.logprob).model_dump(),
            top_logprobs=[self._entry(token, logprob) for token, logprob in chosen.top[:top]],
        )

    def _entry(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self.text(token), logprob=finite(logprob), bytes=list(self.bytes_of(token)))

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
        ranks = {token: rank for rank, (token, _) in enumerate(chosen.top, 1)}
        logprobs = dict(chosen.top) | {chosen.token: chosen.logprob}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token),
                "decoded_token": decoder.text(token),
            }
            for token, logprob in logprobs.items()
        }

    return [None if chosen is None else entry(chosen) for chosen in request.prompt_logprobs]


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
