"""Families of tasks: sets of them by a short name, and those that cannot be used, with the reason."""

from __future__ import annotations

PRESETS: dict[str, tuple[str, ...]] = {
    # Short questions with short answers, which a very small model can learn something of.
    "arithmetic": ("chain_sum", "basic_arithmetic", "gcd", "lcm", "products", "count_bits"),
    # What half a million parameters can learn in minutes: sums of three or four digits, some of them worked out.
    "sums": ("chain_sum:min_terms=3,max_terms=4,min_digits=1,max_digits=1,worked=0.4",),
    # What a hundred million parameters can learn in minutes: questions of many kinds, most of them in plain English.
    "questions": (
        "chain_sum:min_terms=2,max_terms=4,min_digits=1,max_digits=2,worked=0.5",
        "gcd:max_value=60,worked=0.5",
        "number_sorting:max_numbers=5,max_decimals=0",
        "leg_counting:min_animals=1,max_animals=2,max_instances=6,worked=0.5",
        "aiw",
        "syllogism",
        "course_schedule:max_num_courses=6",
        "letter_counting:min_words=2,max_words=4,worked=0.5",
        "word_sequence_reversal:max_words=6",
    ),
    "words": ("spell_backward", "letter_counting", "word_sorting", "caesar_cipher", "word_sequence_reversal"),
    "logic": ("syllogism", "knights_knaves", "family_relationships", "aiw", "coin_flip"),
}

_CHANGES = "its tasks differ from process to process (they depend on the order of Python sets)"
_HANGS = "it can take minutes over a single task"
UNSUITABLE: dict[str, str] = {
    "codeio": _CHANGES,
    "composite": "it is made of other families, each of which can be named by itself",
    "isomorphic_strings": _CHANGES,
    "knight_swap": _CHANGES,
    "list_functions": _CHANGES,
    "number_sequence": _HANGS,
    "polynomial_multiplication": _CHANGES,
    "ransom_note": _CHANGES,
    "sokoban": _HANGS,
    "word_ladder": _CHANGES,
}


def split_names(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` as `a`, `b:x=1,y=2` and `c`: what has an equals sign is an option of the family before it."""
    names: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if names and "=" in piece and ":" not in piece:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return names
