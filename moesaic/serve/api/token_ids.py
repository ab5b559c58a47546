"""`return_token_ids`: the tokens of the prompt and of a choice, exactly as the engine had them, never tokenized again.

A choice's tokens include the one that ended it and those of a stop string, which its text does not show.
"""

from __future__ import annotations

from typing import Any

from moesaic.serve.api.schema.tokens import TokenFields
from moesaic.serve.core.request import Request


class TokenIds:
    """Of one choice. In a stream every chunk brings those since the last one, and the first the prompt's."""

    def __init__(self, request: Request, body: TokenFields, *, prompt_in_choice: bool = False) -> None:
        self.request = request
        self.wanted = bool(body.return_token_ids)
        self.prompt_in_choice = prompt_in_choice  # or in the response, where there is one prompt for all choices
        self.ids: list[int] = []
        self.sent = 0
        self.prompt_sent = False

    def add(self, tokens: list[int]) -> None:
        if self.wanted:
            self.ids += tokens

    def chunk(self) -> dict[str, Any]:
        if not self.wanted:
            return {}
        found: dict[str, Any] = {"token_ids": self.ids[self.sent :]}
        if self.prompt_in_choice and not self.prompt_sent:
            found["prompt_token_ids"] = self.prompt
        self.sent, self.prompt_sent = len(self.ids), True
        return found

    def whole(self) -> dict[str, Any]:
        if not self.wanted:
            return {}
        return {"token_ids": self.ids} | ({"prompt_token_ids": self.prompt} if self.prompt_in_choice else {})

    @property
    def prompt(self) -> list[int]:
        return list(self.request.prompt)
