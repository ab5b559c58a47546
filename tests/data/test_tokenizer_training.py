"""Tokenizers made here: the same each time, and the same in transformers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.data.tokenizer_training import SPECIAL, end_of_document, load_tokenizer, save_tokenizer, train_tokenizer
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

TEXTS = [f"The number {n} is {'even' if n % 2 == 0 else 'odd'}; def f(x): return x + {n}\n\n" for n in range(400)]
SIZE = 300
PROBES = [
    "def f(x):\n    return 123 + 'é🙂'",
    "  leading,  and   trailing  \n\n\t tabs ",
    "\x00\x7f½ ﬁ 漢字 \u200d",
    "",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add 2 and 3."}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "A tool can.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "ü"}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5"},
]


@pytest.fixture(scope="module")
def made() -> Tokenizer:
    return train_tokenizer(TEXTS, SIZE)


class TestTraining:
    def test_has_the_size_that_was_asked_for_and_the_marks_first(self, made: Tokenizer) -> None:
        assert len(made) == SIZE
        assert [made.fast.id_to_token(n) for n in range(len(SPECIAL))] == list(SPECIAL)
        assert made.stop_tokens == {0} == {end_of_document(made)}

    def test_keeps_every_text(self, made: Tokenizer) -> None:
        for text in [*PROBES, TEXTS[3]]:
            assert made.decode(made.encode(text)) == text

    def test_learns(self, made: Tokenizer) -> None:
        assert len(made.encode(TEXTS[5])) < len(TEXTS[5]) / 2
        assert len(made.encode("12345")) == 5  # digits stay apart

    def test_is_the_same_in_another_process(self, made: Tokenizer) -> None:
        program = """
from tests.data.test_tokenizer_training import *
print(hashlib.md5(train_tokenizer(TEXTS, SIZE).files["tokenizer.json"]).hexdigest())
"""
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
        assert out.strip() == hashlib.md5(made.files["tokenizer.json"]).hexdigest()

    def test_too_small_a_vocabulary_is_refused(self) -> None:
        with pytest.raises(UserError, match="model.vocab: 100 is too small"):
            train_tokenizer(TEXTS, 100)

    def test_too_little_text_gives_a_smaller_one(self) -> None:
        assert len(train_tokenizer(["ab ab"], 4096)) < 300


class TestInTransformers:
    def test_reads_it_and_agrees(self, made: Tokenizer, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        save_tokenizer(made, tmp_path)
        theirs = AutoTokenizer.from_pretrained(str(tmp_path))
        ours = load_tokenizer(tmp_path)
        assert len(theirs) == len(ours) == SIZE
        assert theirs.eos_token_id == 0 and theirs.pad_token_id == 1
        for text in [*PROBES, "a <|user|> b<|endoftext|>"]:
            assert theirs(text)["input_ids"] == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == text
        for tools in (None, [{"type": "function", "function": {"name": "add"}}]):
            for reply in (True, False):
                text = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=reply)
                assert text == ours.chat(MESSAGES, reply=reply, tools=tools)
        assert text.startswith("<|system|>\nYou may call") and text.endswith("<|assistant|>\n5<|endoftext|>")
        assert (
            '<think>A tool can.</think>\n<tool_call>{"name": "add", "arguments": {"a": 2, "b": "ü"}}</tool_call>'
            in text
        )

    def test_an_unknown_role_is_refused(self, made: Tokenizer) -> None:
        with pytest.raises(UserError, match='no role "robot"'):
            made.chat([{"role": "robot", "content": "x"}])


class TestTaking:
    def test_from_a_file_and_a_folder(self, made: Tokenizer, tmp_path: Path) -> None:
        save_tokenizer(made, tmp_path)
        assert load_tokenizer(tmp_path).files == made.files
        assert load_tokenizer(tmp_path / "tokenizer.json").files == made.files

    def test_without_one(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has no tokenizer.json"):
            load_tokenizer(tmp_path)
        with pytest.raises(UserError, match="no such file or directory"):
            load_tokenizer(tmp_path / "gone")

    def test_one_that_cannot_end_a_document_is_refused(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer as Fast
        from tokenizers import models

        (tmp_path / "tokenizer.json").write_text(Fast(models.BPE({"a": 0}, [])).to_str())
        with pytest.raises(UserError, match="no token that ends a document"):
            load_tokenizer(tmp_path)
