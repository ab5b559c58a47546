"""Embeddings, rerank and score, by what llama.cpp's, vLLM's and SGLang's suites rely on; values as transformers'."""

from __future__ import annotations

import base64
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

import moesaic
from moesaic.model.directory import save
from moesaic.serve.core.pooling import recommended_pooling
from tests.serve.api.running import NAME, Running, running

TEXT = "The number 7 is a number; yes or no"
DOCUMENTS = ["yes or no", "The number 9 is a number", '{"name": "x"}', "as you like it"]


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def hidden(reference: Any, tokens: list[int]) -> torch.Tensor:
    """After the last norm, (tokens, D)."""
    with torch.no_grad():
        return reference.model(torch.tensor([tokens])).last_hidden_state[0]


def tokens_of(server: Running, text: str, special: bool = True) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text, special=special)


def embed(server: Running, text: Any = TEXT, **wishes: Any) -> list[float]:
    answer = server.post("/v1/embeddings", {"input": text, **wishes})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


def refused(server: Running, path: str, body: dict[str, Any]) -> str:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


class TestEmbeddings:
    @pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
    def test_are_those_of_transformers(self, server: Running, reference: Any, pooling: str) -> None:
        rows_TD = hidden(reference, tokens_of(server, TEXT))
        expected_D = {"mean": rows_TD.mean(0), "last": rows_TD[-1], "cls": rows_TD[0]}[pooling]
        found = embed(server, pooling=pooling, normalize=False)
        assert found == pytest.approx(expected_D.tolist(), abs=2e-4)
        unit_D = expected_D / expected_D.norm()
        assert embed(server, pooling=pooling) == pytest.approx(unit_D.tolist(), abs=2e-4)

    def test_fewer_dimensions_are_the_first_ones_normalized_again(self, server: Running, client: openai.OpenAI) -> None:
        plain = embed(server, normalize=False)
        length = math.sqrt(sum(x * x for x in plain[:5]))
        found = client.embeddings.create(model=NAME, input=TEXT, dimensions=5).data[0].embedding
        assert found == pytest.approx([x / length for x in plain[:5]], abs=1e-5)
        assert embed(server, dimensions=48) == pytest.approx(embed(server), abs=1e-6)

    def test_more_dimensions_than_there_are(self, server: Running) -> None:
        assert refused(server, "/v1/embeddings", {"input": "yes", "dimensions": 49}) == "dimensions"
        assert refused(server, "/v1/embeddings", {"input": "yes", "dimensions": 0}) == "dimensions"

    def test_base64(self, server: Running) -> None:
        packed: Any = embed(server, encoding_format="base64")
        numbers = struct.unpack("<48f", base64.b64decode(packed))
        assert list(numbers) == pytest.approx(embed(server), abs=1e-6)

    def test_token_ids(self, server: Running) -> None:
        tokens = tokens_of(server, TEXT)
        assert embed(server, tokens) == pytest.approx(embed(server), abs=1e-6)
        answer = server.post("/v1/embeddings", {"input": [tokens, [1, 2]]}).json()
        assert [one["index"] for one in answer["data"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": len(tokens) + 2, "total_tokens": len(tokens) + 2}

    def test_truncation(self, server: Running) -> None:
        tokens = tokens_of(server, TEXT)
        assert embed(server, truncate_prompt_tokens=3) == pytest.approx(embed(server, tokens[:3]), abs=1e-5)
        left = embed(server, truncate_prompt_tokens=3, truncation_side="left")
        assert left == pytest.approx(embed(server, tokens[-3:]), abs=1e-5)
        assert embed(server, truncate_prompt_tokens=400) == pytest.approx(embed(server), abs=1e-6)

    def test_all_that_fits_of_a_long_text(self, server: Running) -> None:
        body = {"input": TEXT * 300}
        assert refused(server, "/v1/embeddings", body) == "input"
        answer = server.post("/v1/embeddings", {**body, "truncate_prompt_tokens": -1}).json()
        assert answer["usage"]["prompt_tokens"] == server.engine.max_length
        assert refused(server, "/v1/embeddings", {**body, "truncate_prompt_tokens": 10**6}) == "truncate_prompt_tokens"

    def test_of_a_conversation(self, server: Running) -> None:
        messages = [{"role": "user", "content": TEXT}]
        answer = server.post("/v1/embeddings", {"messages": messages}).json()
        assert server.engine.tokenizer is not None
        text = server.engine.tokenizer.chat(messages, reply=False)
        tokens = tokens_of(server, text, special=False)
        assert answer["data"][0]["embedding"] == pytest.approx(embed(server, tokens), abs=1e-5)
        assert refused(server, "/v1/embeddings", {"messages": messages, "input": TEXT}) == "input"

    @pytest.mark.parametrize("given", ["", [], [""], [[]], 5, None, ["yes", 1], [100_000]])
    def test_what_is_no_input_is_refused(self, server: Running, given: Any) -> None:
        assert refused(server, "/v1/embeddings", {"input": given}).startswith("input")

    def test_too_much_at_once_is_refused_before_it_is_computed(self, server: Running) -> None:
        answer = server.post("/v1/embeddings", {"input": [[7] * 500] * 700})
        assert answer.status_code == 413 and "300000" in answer.json()["error"]["message"]
        assert server.idle

    def test_every_token_by_the_pooling_route(self, server: Running, reference: Any) -> None:
        answer = server.post("/pooling", {"input": TEXT, "pooling": "none"}).json()
        expected_TD = hidden(reference, tokens_of(server, TEXT))
        for row, expected_D in zip(answer["data"][0]["data"], expected_TD, strict=True):
            assert row == pytest.approx(expected_D.tolist(), abs=2e-4)
        assert server.post("/pooling", {"input": TEXT}).json()["data"][0]["data"] == pytest.approx(embed(server))
        assert refused(server, "/v1/embeddings", {"input": TEXT, "pooling": "none"}) == "pooling"


@pytest.fixture(scope="module")
def trained(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained") / "tiny"
    shutil.copytree(directory, place)
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return place


class TestAModelThatSaysHow:
    def test_is_pooled_that_way(self, trained: Path, server: Running) -> None:
        with running(moesaic.Engine(moesaic.load(trained, threads=1), cache_bytes=16 << 20)) as own:
            assert embed(own) == pytest.approx(embed(server, pooling="last"), abs=1e-5)
            assert embed(own, pooling="mean") == pytest.approx(embed(server), abs=1e-5)

    def test_keeps_saying_so_when_it_is_written(self, trained: Path, tmp_path: Path) -> None:
        save(moesaic.load(trained), tmp_path / "copy")
        assert recommended_pooling(moesaic.load(tmp_path / "copy").tokenizer) == "last"

    def test_a_layer_that_is_not_here_is_no_embedding(self, trained: Path, tmp_path: Path) -> None:
        place = tmp_path / "dense"
        shutil.copytree(trained, place)
        kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
        modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (place / "modules.json").write_text(json.dumps(modules))
        with running(moesaic.Engine(moesaic.load(place, threads=1), cache_bytes=16 << 20)) as own:
            answer = own.post("/v1/embeddings", {"input": "yes"})
            assert answer.status_code == 400 and "Dense" in answer.json()["error"]["message"]
            assert own.post("/pooling", {"input": "yes"}).status_code == 200


class TestRerank:
    def rerank(self, server: Running, path: str = "/v1/rerank", **wishes: Any) -> Any:
        answer = server.post(path, {"query": TEXT, "documents": DOCUMENTS, **wishes})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/v1/reranking"])
    def test_the_best_come_first(self, server: Running, path: str) -> None:
        found = self.rerank(server, path)["results"]
        scores = [one["relevance_score"] for one in found]
        assert scores == sorted(scores, reverse=True) and sorted(one["index"] for one in found) == [0, 1, 2, 3]
        assert [one["document"]["text"] for one in found] == [DOCUMENTS[one["index"]] for one in found]

    def test_scores_are_cosines(self, server: Running) -> None:
        query = embed(server)
        for one in self.rerank(server)["results"]:
            cosine = sum(x * y for x, y in zip(query, embed(server, DOCUMENTS[one["index"]]), strict=True))
            assert one["relevance_score"] == pytest.approx(cosine, abs=1e-5)

    @pytest.mark.parametrize(("top_n", "count"), [(None, 4), (0, 4), (2, 2), (4, 4), (99, 4)])
    def test_top_n(self, server: Running, top_n: int | None, count: int) -> None:
        assert len(self.rerank(server, top_n=top_n)["results"]) == count

    def test_the_form_of_tei(self, server: Running) -> None:
        answer = server.post("/rerank", {"query": TEXT, "texts": DOCUMENTS, "return_text": True}).json()
        ours = self.rerank(server)["results"]
        assert [(one["index"], one["score"]) for one in answer] == [(o["index"], o["relevance_score"]) for o in ours]
        assert all(one["text"] == DOCUMENTS[one["index"]] for one in answer)

    def test_usage_counts_every_text_once(self, server: Running) -> None:
        tokens = sum(len(tokens_of(server, text)) for text in [TEXT, *DOCUMENTS])
        assert self.rerank(server)["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}

    def test_documents_as_objects_and_without_them(self, server: Running) -> None:
        objects = [{"text": text} for text in DOCUMENTS]
        found = self.rerank(server, documents=objects, return_documents=False)["results"]
        assert not any("document" in one for one in found)
        assert [one["index"] for one in found] == [one["index"] for one in self.rerank(server)["results"]]

    @pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3], [""], [{"picture": "x"}]])
    def test_what_are_no_documents_is_refused(self, server: Running, documents: Any) -> None:
        assert refused(server, "/v1/rerank", {"query": TEXT, "documents": documents}).startswith("documents")

    def test_a_document_is_cut_off(self, server: Running) -> None:
        cut = self.rerank(server, documents=[TEXT * 300], max_tokens_per_doc=4)
        assert cut["usage"]["prompt_tokens"] == len(tokens_of(server, TEXT)) + 4
        assert refused(server, "/v1/rerank", {"query": TEXT, "documents": ["yes", TEXT * 300]}) == "documents.1"


class TestScore:
    def scores(self, server: Running, path: str = "/score", **body: Any) -> list[float]:
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert [one["index"] for one in answer.json()["data"]] == list(range(len(answer.json()["data"])))
        return [one["score"] for one in answer.json()["data"]]

    def test_one_with_one_one_with_many_and_pairs(self, server: Running) -> None:
        assert len(self.scores(server, text_1="yes", text_2="no")) == 1
        many = self.scores(server, "/v1/score", text_1="yes", text_2=["yes", "no"])
        assert many[0] == pytest.approx(1.0, abs=1e-5) and many[1] < 1.0
        assert self.scores(server, text_1=["yes", "no"], text_2=["yes", "no"]) == pytest.approx([1.0, 1.0], abs=1e-5)

    def test_other_names(self, server: Running) -> None:
        expected = self.scores(server, text_1="yes", text_2=["no", TEXT])
        assert self.scores(server, queries="yes", documents=["no", TEXT]) == expected
        assert self.scores(server, data_1="yes", data_2=["no", TEXT]) == expected

    def test_lists_that_do_not_fit(self, server: Running) -> None:
        assert refused(server, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}) == "text_1"
        assert refused(server, "/score", {"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}) == "text_1"
        assert refused(server, "/score", {"text_1": "a", "text_2": []}) == "text_2"

    def test_generative_is_how_likely_yes_is_beside_no(self, server: Running) -> None:
        """`n` and `y` are tokens of this small vocabulary."""
        body: dict[str, Any] = {"text_1": "Is it a number?", "text_2": [TEXT, "yes"], "scoring": "generative"}
        found = self.scores(server, **body, labels=["y", "n"], instruction="Look closely")
        yes, no = (tokens_of(server, word, special=False)[0] for word in "yn")
        assert server.engine.tokenizer is not None
        for score, document in zip(found, body["text_2"], strict=True):
            asked = f"<Instruct>: Look closely\n<Query>: Is it a number?\n<Document>: {document}"
            rule = (
                "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
                'Note that the answer can only be "yes" or "no".'
            )
            messages = [{"role": "system", "content": rule}, {"role": "user", "content": asked}]
            tokens = tokens_of(server, server.engine.tokenizer.chat(messages, enable_thinking=False), special=False)
            logits_V = server.engine.model.logits([tokens])[0][-1]
            assert score == pytest.approx(float(logits_V[[yes, no]].softmax(-1)[0]), abs=1e-4)

    def test_generative_needs_two_single_tokens(self, server: Running) -> None:
        body = {"text_1": "a", "text_2": "b", "scoring": "generative"}
        assert refused(server, "/score", {**body, "labels": ["certainly", "n"]}) == "labels"
        assert refused(server, "/score", {**body, "labels": ["n", "n"]}) == "labels"
        assert refused(server, "/score", {"text_1": "a", "text_2": "b", "labels": ["y", "n"]}) == "labels"
        assert refused(server, "/score", {"text_1": "a", "text_2": "b", "scoring": "magic"}) == "scoring"


class TestLabels:
    def expected(self, server: Running, prompt: str, labels: list[int], softmax: bool) -> list[float]:
        logits_V = server.engine.model.logits([tokens_of(server, prompt)])[0][-1]
        found = logits_V[labels].softmax(-1) if softmax else logits_V.softmax(-1)[labels]
        return found.tolist()

    @pytest.mark.parametrize("softmax", [True, False])
    @pytest.mark.parametrize("first", [True, False])
    def test_of_every_item(self, server: Running, softmax: bool, first: bool) -> None:
        labels = [70, 80, 90]
        body = {"query": "yes or", "items": [" no", " you"], "label_token_ids": labels}
        answer = server.post("/v1/score", {**body, "apply_softmax": softmax, "item_first": first}).json()
        assert answer["object"] == "scoring"
        for item, scores in zip(body["items"], answer["scores"], strict=True):
            prompt = item + "yes or" if first else "yes or" + item
            assert scores == pytest.approx(self.expected(server, prompt, labels, softmax), abs=1e-4)
            assert not softmax or sum(scores) == pytest.approx(1.0, abs=1e-5)

    def test_tokens_as_query_and_items(self, server: Running) -> None:
        body = {"query": [70, 71], "items": [[72], [73]], "label_token_ids": [80, 81]}
        by_tokens = server.post("/v1/score", body).json()
        assert len(by_tokens["scores"]) == 2 and by_tokens["usage"]["prompt_tokens"] == 6

    def test_the_form_of_vllm(self, server: Running) -> None:
        body = {"query": "yes or", "items": [" no", " you"], "label_token_ids": [70, 80]}
        answer = server.post("/generative_scoring", body).json()
        theirs = [self.expected(server, "yes or" + item, [70, 80], True)[0] for item in body["items"]]
        assert [one["score"] for one in answer["data"]] == pytest.approx(theirs, abs=1e-4)

    @pytest.mark.parametrize(
        ("change", "place"),
        [({"label_token_ids": []}, "label_token_ids"), ({"label_token_ids": [10**6]}, "label_token_ids"),
         ({"items": []}, "items"), ({"items": [""], "query": ""}, "items.0")],
    )  # fmt: skip
    def test_what_cannot_be_is_refused(self, server: Running, change: dict[str, Any], place: str) -> None:
        body = {"query": "yes", "items": ["no"], "label_token_ids": [70]}
        assert refused(server, "/v1/score", body | change) == place
