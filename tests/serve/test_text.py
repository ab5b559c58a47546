"""Text as it streams: whole characters only, no piece of a stop string, and in the end what decoding gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data.tokenizer_training import train_tokenizer
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.text import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a few words, said again and again, as one says words"], 280)


def streamed(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, (), stop)
    pieces = [stream.push(token) for token in tokenizer.encode(text, special=False)]
    return [*pieces, stream.finish()], stream


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<[")))  # which begin the tokenizer's own marks
def test_pieces_make_the_text_and_none_holds_half_a_character(tokenizer, text):
    pieces, _ = streamed(tokenizer, text)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_a_character_of_several_tokens_comes_at_once(tokenizer):
    assert len(tokenizer.encode("👩‍🔬", special=False)) > 4
    pieces, _ = streamed(tokenizer, "x👩‍🔬y")
    assert [piece for piece in pieces if piece] == ["x", "👩", "\u200d", "🔬", "y"]


def test_marks_that_are_said_are_shown_and_others_are_not(tokenizer):
    pieces, _ = streamed(tokenizer, "<think>é</think>so<|user|> <tool_call>x<|endoftext|>")
    assert "".join(pieces) == "<think>é</think>so <tool_call>x"


def test_half_a_character_before_a_mark_stays_before_it(tokenizer):
    (half, _), (mark, *rest) = (tokenizer.encode(text, special=False) for text in ("é", "</think>éx"))
    for prompt in ([], tokenizer.encode("words", special=False), [*tokenizer.encode("words", special=False), half]):
        stream = TextStream(tokenizer, prompt)
        said = [stream.push(token) for token in (half, mark, mark, *rest)]
        assert said == ["", "\ufffd</think>", "</think>", "", "é", "x"]


def test_half_a_character_at_the_end_is_never_said(tokenizer):
    stream = TextStream(tokenizer)
    half = tokenizer.encode("é", special=False)[:-1]
    assert half
    assert "".join(stream.push(token) for token in half) + stream.finish() == ""


@pytest.mark.parametrize(("least", "said"), [(0, "a"), (2, "ax"), (3, "ax"), (4, "axbxc"), (9, "axbxcx")])
def test_a_stop_string_ends_no_text_that_is_too_short(tokenizer, least, said):
    tokens = [tokenizer.encode(sign, special=False)[0] for sign in "axbxcx"]
    stream = TextStream(tokenizer, (), ("x", "bx"), least)
    assert "".join(stream.push(token) for token in tokens) + stream.finish() == said


@pytest.mark.parametrize("character", ["é", "ש", "👩"])
def test_of_a_character_that_the_prompt_began_the_answer_says_that_one_alone(tokenizer, character):
    *before, last = tokenizer.encode("some words " + character, special=False)
    stream = TextStream(tokenizer, before)
    assert [stream.push(token) for token in (last, *tokenizer.encode("x", special=False))] == [character, "x"]


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_prompt_that_ends_in_no_character_is_not_said_again(tokenizer, left_out):
    prompt = tokenizer.encode("some words \ufffd", special=False)
    stream = TextStream(tokenizer, prompt[: len(prompt) - left_out])
    assert stream.push(tokenizer.encode("x", special=False)[0]) == "x"


@given(
    st.text(alphabet="abcx", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stops):
    pieces, stream = streamed(tokenizer, text, tuple(stops))
    places = [text.find(stop) for stop in stops if stop in text]
    found = "".join(pieces)
    if not places:
        assert stream.stopped is None and found == text
        return
    assert stream.stopped in stops and text[len(found) :].startswith(stream.stopped)
    assert text.startswith(found)
    # Streaming stops at the token in which the first stop string is complete; the earliest in that text is cut.
    assert len(found) in places and not any(stop in found for stop in stops)
