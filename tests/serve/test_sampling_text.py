"""Sampling params of a command line."""

from __future__ import annotations

import pytest

from moesaic.errors import UserError
from moesaic.serve.core.sampling import Sampling
from moesaic.serve.core.sampling_text import KINDS, parse_sampling


def test_every_kind_of_value():
    given = [
        "min_p=0.05",
        "mirostat=2",
        "ignore_eos=true",
        "bad_words=a b,c",
        "samplers=top_k,min_p",
        "repeat_last_n=-1",
    ]
    expected = {
        "min_p": 0.05, "mirostat": 2, "ignore_eos": True, "bad_words": ("a b", "c"), "samplers": ("top_k", "min_p"),
        "repeat_last_n": -1,
    }  # fmt: skip
    assert parse_sampling(given) == expected
    assert parse_sampling([r"dry_sequence_breakers=\n,:"]) == {"dry_sequence_breakers": ("\n", ":")}
    assert {"temperature", "dry_base", "xtc_threshold", "typical_p", "seed"} <= KINDS.keys()
    assert Sampling(**parse_sampling(given)).bad_words == ("a b", "c")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("min_p", "is no NAME=VALUE"),
        ("minp=1", "Did you mean|did you mean"),
        ("min_p=x", "must be a number"),
        ("top_k=1.5", "must be a whole number"),
        ("min_p=nan", "must be a number"),
        ("ignore_eos=1", "must be true or false"),
        ("min_p=2", "between 0 and 1"),
        ("grammar=x", "there is no"),
        ("stop=x", "each request's own"),
    ],
)
def test_what_is_wrong_is_said(text, problem):
    with pytest.raises(UserError, match=problem):
        parse_sampling([text], without=("stop",))
