"""Single tokens as text and bytes, for log-probabilities: a token may be half a character."""

from __future__ import annotations

import json
import re
from functools import cached_property

from tokenizers import AddedToken

from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.schema.chat import TokenInfo, TopLogprob
from moesaic.serve.core.request import TokenLogprob
from moesaic.serve.core.text import SAID

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        if token not in self.known:
            self.known[token] = self._bytes(token)
        return self.known[token]

    def text(self, token: int) -> str:
        """As OpenAI writes it: a token that is no whole characters is written as its bytes."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_mark(self, token: int) -> bool:
        """Whether a token is left out of texts, because it only begins, ends or divides them."""
        added = self._added.get(token)
        return added is not None and added.special and added.content not in SAID

    def info(self, chosen: TokenLogprob, top: int) -> TokenInfo:
        return TokenInfo(
            **self._entry(chosen.token, chosen.logprob).model_dump(),
            top_logprobs=[self._entry(token, logprob) for token, logprob in chosen.top[:top]],
        )

    def _entry(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self.text(token), logprob=finite(logprob), bytes=list(self.raw(token)))

    def _bytes(self, token: int) -> bytes:
        piece = self.tokenizer.fast.id_to_token(token)
        if piece is None:  # the model's vocabulary is rounded up
            return b""
        if token in self._added:
            return piece.encode()
        if self._byte_level and all(sign in BYTES for sign in piece):
            return bytes(BYTES[sign] for sign in piece)
        if match := BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self.tokenizer.fast.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.fast.to_str()).get("decoder"))


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return logprob if logprob > -9999.0 else -9999.0


def _byte_signs() -> dict[str, int]:
    """How byte-level tokenizers write bytes: the printable ones of Latin-1 as they are, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTES = _byte_signs()
