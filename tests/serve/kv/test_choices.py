"""What each policy chooses, beside small computations in numpy that share no code with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.serve.core.kv_policies import AttentionStatistics, KVPolicy, Retained, TokenKinds
from moesaic.serve.core.kv_policies.fastgen import FastGen
from moesaic.serve.core.kv_policies.h2o import H2O
from moesaic.serve.core.kv_policies.kvmerger import KVMerger
from moesaic.serve.core.kv_policies.lethe import Lethe
from moesaic.serve.core.kv_policies.minikv import MiniKV
from moesaic.serve.core.kv_policies.sinks import Sinks
from moesaic.serve.core.kv_policies.snapkv import SnapKV

LAYERS, HEADS, ROWS, SIZE = 3, 2, 40, 8
VOCABULARY = 20


def seen(scores: np.ndarray, prompt: int | None = None, tokens: Sequence[int] | None = None) -> AttentionStatistics:
    rows = scores.shape[-1]
    keys = np.random.default_rng(5).normal(size=(LAYERS, HEADS, rows, SIZE)).astype(np.float32)
    kinds = TokenKinds(torch.arange(VOCABULARY) < 2, torch.arange(VOCABULARY) == 5)
    return AttentionStatistics(
        computed=rows,
        prompt=rows if prompt is None else prompt,
        tokens=list(tokens or [7] * rows),
        positions_LNM=torch.arange(rows, dtype=torch.int32).expand(LAYERS, HEADS, rows).clone(),
        scores_LNM=torch.from_numpy(scores),
        keys=lambda layer: torch.from_numpy(keys[layer]),
        kinds=lambda: kinds,
    )


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.default_rng(0).gamma(0.3, size=(LAYERS, HEADS, ROWS)).astype(np.float32)


def chosen(policy: KVPolicy, given: AttentionStatistics) -> np.ndarray:
    kept = policy.prune(given)
    assert kept is not None
    return kept.rows_LNM.expand(LAYERS, HEADS, given.computed).numpy()


def highest(row: np.ndarray, count: int) -> set[int]:
    return set(np.argsort(-row, kind="stable")[:count].tolist())


def test_sinks(scores: np.ndarray) -> None:
    rows = chosen(Sinks(share=0.25, least=1, sinks=3), seen(scores))
    assert all(set(np.flatnonzero(row)) == {0, 1, 2, *range(33, 40)} for row in rows.reshape(-1, ROWS))


def test_sinks_that_are_gone_are_not_kept(scores: np.ndarray) -> None:
    """After a pruning positions are what they were, and heads that have fewer rows begin later."""
    given = seen(scores)
    given.positions_LNM[0, 0, :30] = -1
    rows = chosen(Sinks(share=0.5, least=1, sinks=3), given)
    assert set(np.flatnonzero(rows[0, 0])) == set(range(30, 40))


def test_h2o(scores: np.ndarray) -> None:
    rows = chosen(H2O(share=0.25, least=1, recent=0.4), seen(scores))
    for layer in range(LAYERS):
        for head in range(HEADS):
            expected = highest(scores[layer, head, :36], 6) | {36, 37, 38, 39}
            assert set(np.flatnonzero(rows[layer, head])) == expected


def test_snapkv(scores: np.ndarray) -> None:
    rows = chosen(SnapKV(share=0.4, least=1, window=4, pool=3), seen(scores))
    for layer in range(LAYERS):
        for head in range(HEADS):
            votes = np.pad(scores[layer, head, :36], 1, constant_values=-np.inf)
            pooled = np.array([votes[i : i + 3].max() for i in range(36)])
            assert set(np.flatnonzero(rows[layer, head])) == highest(pooled, 12) | {36, 37, 38, 39}


def test_lethe_gives_more_to_layers_that_look_at_more() -> None:
    generator = np.random.default_rng(1)
    scores = np.stack([generator.gamma(shape, size=(HEADS, ROWS)) for shape in (0.05, 0.5, 5.0)]).astype(np.float32)
    rows = chosen(Lethe(share=0.25, least=4, recent=0.25, pool=1), seen(scores))
    part = scores / scores.sum(-1, keepdims=True)
    spread = np.exp(-(part * np.log(np.maximum(part, 1e-20))).sum(-1)).mean(-1)
    total = rows[:, 0].sum()
    assert 27 <= total <= 30  # a quarter of 120, rounded down in every layer
    # Clamped from below, then in proportion to what is looked at.
    counts = rows.sum(-1)
    assert (counts[:, 0] == counts[:, 1]).all() and counts[0, 0] >= 4
    free = [layer for layer in range(LAYERS) if counts[layer, 0] > 4]
    for one in free:
        for other in free:
            assert abs(counts[one, 0] / spread[one] - counts[other, 0] / spread[other]) < 1.5 / min(spread[free])
    assert counts[2, 0] > counts[0, 0]
    for layer in range(LAYERS):
        newest = round(float(counts[layer, 0]) * 0.25)
        for head in range(HEADS):
            older = highest(scores[layer, head, : ROWS - newest], counts[layer, 0] - newest)
            assert set(np.flatnonzero(rows[layer, head])) == older | set(range(ROWS - newest, ROWS))


def test_lethe_with_equal_layers_is_equal(scores: np.ndarray) -> None:
    rows = chosen(Lethe(share=0.25, least=1, unequal=0.0), seen(scores))
    assert (rows.sum(-1) == 10).all()


def test_minikv_keeps_fewer_in_later_layers(scores: np.ndarray) -> None:
    for first in (0, 4):
        rows = chosen(MiniKV(share=0.5, least=1, falling=0.5, newest=0.5, pool=1, first=first), seen(scores))
        assert rows.sum(-1).tolist() == [[30, 30], [20, 20], [10, 10]]
        for layer, budget in enumerate((30, 20, 10)):
            newest = budget // 2
            ends = {*range(first), *range(ROWS - newest, ROWS)}
            for head in range(HEADS):
                between = highest(scores[layer, head, first : ROWS - newest], budget - newest - first)
                assert set(np.flatnonzero(rows[layer, head])) == {row + first for row in between} | ends
    assert MiniKV(share=0.5, least=1).prune(seen(scores, prompt=30)) is None  # the answer stays
    lonely = np.zeros_like(scores)
    lonely[..., 20] = 1.0
    pooled = chosen(MiniKV(share=0.25, least=1, falling=0.0, newest=0.2, pool=5, first=0), seen(lonely))
    assert pooled[..., 18:23].all()  # with the rows beside it


def test_fastgen_takes_the_cheapest_structure_that_is_enough() -> None:
    """Heads that look at special tokens, at punctuation, at a few, at the newest, or everywhere."""
    tokens = [7] * ROWS
    tokens[10], tokens[20], tokens[21] = 1, 5, 5  # special, punctuation twice
    scores = np.full((LAYERS, HEADS, ROWS), 1e-4, dtype=np.float32)
    scores[0, 0, [0, 10]] = 1.0
    scores[0, 1, [20, 21]] = 1.0
    scores[1, 0, [3, 15, 25, 30]] = 1.0
    scores[1, 1, [4, 6, 16, 26, 36, 37, 38, 39]] = 1.0
    scores[2, :, :] = 1.0
    policy = FastGen(share=1.0, least=1, recover=0.9, frequent=0.1, local=0.1, pool=1)
    rows = chosen(policy, seen(scores, tokens=tokens))
    special, punctuation = {0, 10, 39}, {0, 10, 39, 20, 21}
    assert set(np.flatnonzero(rows[0, 0])) == special
    assert set(np.flatnonzero(rows[0, 1])) == punctuation
    assert set(np.flatnonzero(rows[1, 0])) == punctuation | {3, 15, 25, 30}
    assert set(np.flatnonzero(rows[1, 1])) == punctuation | {4, 6, 16, 26} | {36, 37, 38, 39}
    assert rows[2].all()


def test_fastgen_applies_structures_to_generated_tokens() -> None:
    """Each head goes on with the structure it got after the prompt, whatever it looks at later."""
    tokens = [7] * ROWS
    tokens[10] = 1
    scores = np.full((LAYERS, HEADS, ROWS), 1e-4, dtype=np.float32)
    scores[0, :, [0, 10]] = 1.0  # special tokens
    scores[1, :, [3, 15, 25, 30, 36, 37, 38, 39]] = 1.0  # and the newest
    scores[2] = 1.0  # everything
    policy = FastGen(share=1.0, least=1, every=8, recover=0.9, frequent=0.1, local=0.1, pool=1)
    given = seen(scores, tokens=tokens)
    first = chosen(policy, given)
    assert set(np.flatnonzero(first[0, 0])) == {0, 10, 39}
    # Eight tokens later, the third of which is special and the fifth punctuation; all look at the generated ones.
    more = np.pad(scores, ((0, 0), (0, 0), (0, 8)), constant_values=5.0)
    longer = [*tokens, 7, 7, 1, 7, 5, 7, 7, 7]
    later = replace(seen(more, prompt=ROWS, tokens=longer), notes=given.notes)
    rows = chosen(policy, later)
    assert set(np.flatnonzero(rows[0, 0])) == {0, 10, 42, 47}
    assert set(np.flatnonzero(rows[1, 0])) >= {0, 10, 42, 44, 43, 45, 46, 47}
    assert not rows[1, 0, [36, 37, 38, 39]].any()  # no longer the newest
    assert rows[2].all()
    assert policy.due(ROWS, ROWS) == ROWS + 8 and policy.score_from(ROWS + 8, ROWS) == ROWS


def test_fastgen_lowers_what_is_enough_until_it_fits(scores: np.ndarray) -> None:
    rows = chosen(FastGen(share=0.3, least=1), seen(scores))
    assert rows.sum() <= 0.3 * rows.size
    assert len(set(rows.sum(-1).flatten().tolist())) > 1  # heads differ
    more = chosen(FastGen(share=0.6, least=1), seen(scores))
    assert rows.sum() < more.sum() <= 0.6 * rows.size


def test_kvmerger_sets_and_weights(scores: np.ndarray) -> None:
    given, policy = seen(scores), KVMerger(share=0.5, least=1, recent=0.25, heavy=0.25, pool=1)
    kept = policy.prune(given)
    assert kept is not None and kept.onto_LNM is not None
    keys = np.stack([given.keys(layer).numpy() for layer in range(LAYERS)])
    values = np.random.default_rng(9).normal(size=keys.shape).astype(np.float32)
    for layer in range(LAYERS):
        merged = policy.merge(torch.from_numpy(keys[layer]), torch.from_numpy(values[layer]), kept.onto_LNM[layer])
        for head in range(HEADS):
            own, score = keys[layer, head], scores[layer, head]
            whole = set(range(35, 40)) | highest(score[:35], 5)
            unit = own / np.linalg.norm(own, axis=-1, keepdims=True)
            alike = {place: float(unit[place] @ unit[place - 1]) for place in range(1, ROWS)}
            forced = {place for place in alike if place in whole or place - 1 in whole}
            free = sorted((place for place in alike if place not in forced), key=lambda place: alike[place])
            if len(forced) > 19:
                continue  # more is to stay whole than there is room for cuts
            cuts = sorted(forced | set(free[: 19 - len(forced)]))
            sets = np.split(np.arange(ROWS), cuts)
            assert len(sets) == 20 == kept.rows_LNM[layer, head].sum()
            for members in sets:
                pivot = members[np.argmax(score[members])]
                assert kept.rows_LNM[layer, head, pivot]
                assert (kept.onto_LNM[layer, head, members] == pivot).all()
                distance = np.linalg.norm(own[members] - own[pivot], axis=-1)
                sigma = max(distance.mean(), 1e-6)
                weight = np.exp(-(distance**2) / (2 * sigma**2))
                weight /= weight.sum()
                np.testing.assert_allclose(merged[0][head, pivot], weight @ own[members], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(
                    merged[1][head, pivot], weight @ values[layer, head, members], rtol=1e-4, atol=1e-5
                )


def test_scores_are_the_attention_transformers_computes() -> None:
    """What policies watch, summed over a group's heads, is what another implementation reports as attention."""
    import tempfile

    import transformers

    import moesaic
    from moesaic.serve.core.engine import Engine

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as path:
        theirs.save_pretrained(path)
        model = moesaic.load(path)
    tokens = [int(number) for number in torch.randint(0, 50, (45,))]
    with torch.no_grad():
        attention = theirs(torch.tensor([tokens]), output_attentions=True).attentions
    watched: list[AttentionStatistics] = []

    class Spy(KVPolicy):
        def __init__(self, first: int, decay: float) -> None:
            self.first, self.decay = first, decay

        def due(self, computed: int, prompt: int) -> int:
            return prompt if computed < prompt else 10_000

        def score_from(self, due: int, prompt: int) -> int:
            return self.first

        def prune(self, seen: AttentionStatistics) -> None:
            watched.append(replace(seen, scores_LNM=seen.scores_LNM.clone()))

    from moesaic.serve.core.scheduling_policies.chunked import Chunked

    for first, decay, chunk in ((0, 1.0, 512), (0, 1.0, 10), (37, 1.0, 512), (37, 1.0, 3), (0, 0.9, 512), (0, 0.9, 7)):
        engine = Engine(model, kv_policy=Spy(first, decay), policy=Chunked(tokens=chunk), cache_bytes=1 << 22)
        engine.generate([tokens], max_tokens=2, temperature=0.0, ignore_eos=True)
        fading = decay ** torch.arange(44, -1, -1).float()
        for layer, weights in enumerate(attention):
            grouped = weights[0].unflatten(0, (2, 2)).sum(1)  # (kv heads, queries, rows)
            expected = (grouped * fading[:, None])[:, first:].sum(1)
            torch.testing.assert_close(watched[-1].scores_LNM[layer][:, :45], expected, rtol=1e-3, atol=1e-5)


def test_minikv_keeps_equally_many_rows_in_all_heads_without_newest_ones(scores):
    """Quantized blocks are shared by the heads of a layer, also where the one row that always stays is not chosen."""
    policy = MiniKV(share=0.25, least=1, newest=0.0, first=0, pool=1)
    given = seen(scores)
    retained = policy.prune(given)
    assert retained is not None
    retained.check(policy, given.present_LNM, [0] * LAYERS)
    counts = retained.rows_LNM.sum(-1)
    assert (counts == counts[:, :1]).all() and retained.rows_LNM[..., -1].all()


class TestWhatAPolicyMayNotReturn:
    """Ragged rows are fine, except where they could not be packed."""

    def rows(self) -> torch.Tensor:
        return torch.ones(LAYERS, HEADS, ROWS, dtype=torch.bool)

    def test_ragged_rows_are_allowed(self):
        rows = self.rows()
        rows[0, 1, :9] = False
        Retained(rows).check(H2O(), self.rows(), [0] * LAYERS)

    @pytest.mark.parametrize("wrong", [torch.ones(HEADS, ROWS, dtype=torch.bool), torch.ones(LAYERS, HEADS, ROWS)])
    def test_other_shapes_and_types(self, wrong):
        with pytest.raises(ValueError, match=r"H2O.prune: .* booleans of shape \(3, 2, 40\)"):
            Retained(wrong).check(H2O(), self.rows(), [0] * LAYERS)

    def test_ragged_heads_that_share_blocks(self):
        rows = self.rows()
        rows[0, 1, :9] = False
        with pytest.raises(ValueError, match="equally many"):
            Retained(rows).check(MiniKV(), self.rows(), [0] * LAYERS)

    def test_pruning_quantized_rows(self):
        rows = self.rows()
        rows[0, :, :9] = False
        Retained(rows).check(MiniKV(), self.rows(), [0, 16, 16])
        with pytest.raises(ValueError, match="quantized already"):
            Retained(rows).check(MiniKV(), self.rows(), [16, 0, 0])

    def test_merging_into_what_is_pruned_or_missing(self):
        rows, onto = self.rows(), torch.arange(ROWS).expand(LAYERS, HEADS, ROWS).clone()
        onto[0, 0, 5], rows[0, 0, 5] = 6, False
        Retained(rows, onto).check(KVMerger(), self.rows(), [0] * LAYERS)
        present = self.rows()
        present[1, 1, 0] = False
        with pytest.raises(ValueError, match="misses"):
            Retained(rows, onto).check(KVMerger(), present, [0] * LAYERS)
        rows[0, 0, 6] = False
        with pytest.raises(ValueError, match="that are retained"):
            Retained(rows, onto).check(KVMerger(), self.rows(), [0] * LAYERS)
