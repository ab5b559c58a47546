"""Names of the last version that still work: each is taken for its new one, with a note on standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Methods, by the folder of their kind.
METHODS: dict[str, dict[str, str]] = {"kv_policies": {"quantised": "quantized"}}
# Options of methods, by folder and method.
OPTIONS: dict[str, dict[str, dict[str, str]]] = {
    "quality": {"length": {"most": "max_characters"}},
    "rewards": {"length": {"least": "min_length", "most": "max_length"}},
    "stages": {
        "distill": {"longest": "max_length", "softness": "kl_temperature"},
        "policy": {"remember": "replay_sft"},
        "preference": {"longest": "max_length"},
        "rejection": {"longest": "max_length", "questions": "prompts"},
        "reward_model": {"longest": "max_length"},
        "sft": {"longest": "max_length"},
    },
}
# Keys of a recipe, dotted.
RECIPE_KEYS: dict[str, str] = {"train.spike.most": "train.spike.max_rewinds"}
# Flags, by command.
FLAGS: dict[str, dict[str, str]] = {"compress": {"--least": "--min-expert-tokens"}}


def current(old: str, names: Mapping[str, str], what: str) -> str:
    """The name that `old` has now; `what` says where it was written."""
    new = names.get(old)
    if new is None:
        return old
    print(f"note: {what}: {old} is now called {new}; the old name works in this version only", file=sys.stderr)
    return new


def current_options(options: Mapping[str, Any], names: Mapping[str, str], what: str) -> dict[str, Any]:
    """The options of a method under the names that they have now."""
    return {current(name, names, what): value for name, value in options.items()}


def current_flags(words: Sequence[str], command: str) -> list[str]:
    """A command's words, with `--flag` and `--flag=value` under the names that they have now."""
    names = FLAGS.get(command, {})
    split = (word.partition("=") for word in words)
    return [current(flag, names, f"moesaic {command}") + sign + value for flag, sign, value in split]


def rename_keys(values: dict[str, Any], what: str) -> None:
    """Move, in place, what a recipe says under an old key to the new one; what it says there already stays."""
    for old, new in RECIPE_KEYS.items():
        *sections, key = old.split(".")
        section = _section(values, sections)
        if isinstance(section, dict) and key in section:
            current(old, RECIPE_KEYS, what)
            value = section.pop(key)
            *sections, key = new.split(".")
            _section(values, sections, make=True).setdefault(key, value)


def _section(values: Any, names: Sequence[str], make: bool = False) -> Any:
    for name in names:
        if not isinstance(values, dict):
            return None
        if make and values.get(name) is None:
            values[name] = {}
        values = values.get(name)
    return values
