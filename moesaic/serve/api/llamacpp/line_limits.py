"""When an editor has seen enough: a completion ends where a line is indented less than `n_indent`, or, once it has a
whole line, after `t_max_predict_ms`."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.core.request import Request


@dataclass(frozen=True)
class LineLimits:
    indent: int = 0  # 0: any
    milliseconds: int = 0  # from the first token on; 0: no limit

    def __bool__(self) -> bool:
        return self.indent > 0 or self.milliseconds > 0

    def kept(self, text: str, request: Request) -> int | None:
        """How many characters of a completion are kept; None: it goes on."""
        if "\n" not in text:
            return None
        if self.indent > 0 and (end := self._outdented(text)) is not None:
            return end
        first, last = request.first_token, request.last_token
        took = 0.0 if first is None or last is None else 1000 * (last - first)
        return len(text) if 0 < self.milliseconds < took else None

    def _outdented(self, text: str) -> int | None:
        """Where the first line after the first one that is indented too little begins."""
        at = text.find("\n") + 1
        while at:
            line = text[at:].split("\n", 1)[0]
            words = line.lstrip(" \t")
            if words and len(line) - len(words) < self.indent:
                return at
            at = text.find("\n", at) + 1
        return None
