"""What a model can call in an environment. Each tool is one file, found by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Tool:
    description: ClassVar[str] = ""
    parameters: ClassVar[dict[str, Any]] = {}  # JSON schema of the arguments

    def __call__(self, **arguments: Any) -> str:
        """What the model is shown. A ValueError is shown too, and is the model's fault."""
        raise NotImplementedError

    def spec(self, name: str) -> dict[str, Any]:
        """As in the API."""
        told = {"name": name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


def one_text(name: str) -> dict[str, Any]:
    """The JSON schema of a single argument, a text."""
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
