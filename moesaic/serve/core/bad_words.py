"""Words that must not be generated, as vLLM has them: a word is one or more tokens, and the last of these is forbidden
where the completion ends in the others."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

Words = Sequence[str | tuple[int, ...]]


def token_sequences(tokenizer: Tokenizer | None, words: Words, vocab: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of every word at the start of a text, and of the same word after a space. vLLM takes the latter only
    where they are as many: a word that is one token after a space and two at the start would come through."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, tuple):
            found[word] = None
            continue
        if tokenizer is None:
            raise UserError("bad_words", "the model has no tokenizer", "Give token numbers.")
        if not word.lstrip():
            raise UserError("bad_words", f"{word!r} is no word", "Leave it out.")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            found[tuple(tokenizer.encode(text, special=False))] = None
    found.pop((), None)
    if any(not 0 <= token < vocab for word in found for token in word):
        raise UserError("bad_words", f"holds a token outside the vocabulary of {vocab}")
    return tuple(found)


def forbidden(words: Words, written: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words (as tokens) after these."""
    last = []
    for word in words:
        head = len(word) - 1
        if head <= len(written) and (not head or tuple(written[-head:]) == word[:-1]):
            last.append(int(word[-1]))
    return last
