"""Fill in the middle: llama.cpp's /infill, and `suffix` of completions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

import moesaic
from tests.peers.test_llamacpp import refused, tokens_of
from tests.serve.api.running import NAME, Running, running

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def filling(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose tokenizer has the tokens to fill in the middle with."""
    place = tmp_path_factory.mktemp("filling") / "tiny"
    shutil.copytree(directory, place)
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.add_special_tokens(FIM)
    tokenizer.save(str(place / "tokenizer.json"))
    model = moesaic.load(place, threads=1)
    with running(moesaic.Engine(model, cache_bytes=16 << 20, seed=0)) as server:
        yield server


class TestInfill:
    BODY = {"input_prefix": "yes or ", "input_suffix": " as you like", "n_predict": 4, "temperature": 0.0}

    def ids(self, server: Running) -> list[int]:
        assert server.engine.tokenizer is not None
        return [server.engine.tokenizer.fast.token_to_id(name) for name in FIM]

    def test_between_prefix_and_suffix(self, filling: Running) -> None:
        prefix, suffix, middle, *_ = FIM
        found = filling.post("/infill", self.BODY | {"prompt": "no"}).json()
        assert found["prompt"] == f"{prefix}yes or no{suffix} as you like{middle}"
        assert found["stop"] is True and isinstance(found["content"], str)

    def test_with_other_files(self, filling: Running) -> None:
        extra = [{"filename": "llama.h", "text": "The number\n"}]
        found = filling.post("/infill", self.BODY | {"input_extra": extra}).json()["prompt"]
        assert found.startswith(FIM[3]) and f"{FIM[4]}llama.h\nThe number\n{FIM[4]}" in found
        assert found.index(FIM[4]) < found.index(FIM[0]) < found.index(FIM[1]) < found.index(FIM[2])

    @pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"text": 4}])
    def test_files_without_a_text_are_refused(self, filling: Running, extra: Any) -> None:
        assert "input_extra.0" in refused(filling, "/infill", self.BODY | {"input_extra": [extra]})

    def test_more_than_fits_is_cut_off_far_from_the_gap(self, filling: Running) -> None:
        body = self.BODY | {"input_prefix": "no " * 1000 + "PRE", "input_suffix": "SUF" + " no" * 1000}
        found = filling.post("/infill", body).json()
        assert found["tokens_evaluated"] <= filling.engine.max_length - 4
        assert f"PRE{FIM[1]}SUF" in found["prompt"] and found["prompt"].endswith(FIM[2])

    def test_a_token_of_another_file_ends_it(self, filling: Running) -> None:
        file = self.ids(filling)[4]
        found = filling.post("/infill", self.BODY | {"logit_bias": [[file, 100]]}).json()
        assert found["content"] == "" and found["stop_type"] == "eos" and found["tokens_predicted"] == 1

    def test_suffix_of_a_completion_is_the_same(self, filling: Running) -> None:
        by_suffix = filling.client().completions.create(
            model=NAME, prompt="yes or ", suffix=" as you like", max_tokens=4, temperature=0.0
        )
        assert by_suffix.choices[0].text == filling.post("/infill", self.BODY).json()["content"]
        assert by_suffix.usage is not None
        assert by_suffix.usage.prompt_tokens == 3 + sum(len(tokens_of(filling, t)) for t in ("yes or ", " as you like"))

    def test_a_model_without_such_tokens_says_so(self, server: Running, client: openai.OpenAI) -> None:
        assert "fill in" in refused(server, "/infill", self.BODY, status=501)
        with pytest.raises(openai.BadRequestError, match="fill in"):
            client.completions.create(model=NAME, prompt="a", suffix="b")
