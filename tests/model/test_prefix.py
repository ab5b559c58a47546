"""Part A of blank infilling: the first tokens of a sequence see each other, whatever kernel attends."""

from __future__ import annotations

import pytest
import torch

from moesaic.data.packing import IGNORED, Batch
from moesaic.model.config import Dense, GroupedQuery, Infilling, Layer, ModelConfig, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.blanks import with_blanks
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.train.objectives import shifted
from moesaic.train.objectives.blank_infilling import BlankInfilling

MASK, REST, START, END = 56, 57, 58, 59
CONFIG = ModelConfig(
    "moesaic",
    60,
    32,
    GroupedQuery(4, 2, 8),
    Rope(8),
    (Layer(Dense(48)), Layer(Dense(48))),
    init_std=0.2,
    eos=(END,),
    infilling=Infilling(START, (MASK, REST)),
)
TEXT = [4, 9, MASK, 7, 30, 31]


def hidden(model: Model, tokens: list[int], prefix: int) -> torch.Tensor:
    return model(torch.tensor(tokens), Layout([len(tokens)], prefixes=[prefix]))


@torch.no_grad()
def test_a_prefix_sees_itself_both_ways_and_nothing_behind_it() -> None:
    model = Model(CONFIG).initialize(0)
    before = hidden(model, [1, 2, 3, 4, 5, 6], 4)
    inside, behind = hidden(model, [1, 2, 3, 9, 5, 6], 4), hidden(model, [1, 2, 3, 4, 9, 6], 4)
    assert (inside[:3] - before[:3]).abs().amin(0).max() > 1e-3  # an earlier token sees a later one
    assert torch.equal(behind[:4], before[:4]) and not torch.allclose(behind[5], before[5])
    assert torch.equal(hidden(model, [1, 2, 3], 0), hidden(model, [1, 2, 3], 1))
    assert not torch.allclose(hidden(model, [1, 2, 3], 0)[0], hidden(model, [1, 2, 3], 3)[0])


@pytest.mark.parametrize("mode", ["fast", "invariant"])
def test_every_kernel_agrees_with_the_reference(mode: str) -> None:
    """Hidden states and gradients, with other sequences beside."""
    lengths, prefixes = [9, 70, 5], [6, 66, 0]
    tokens_T = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    target_TD = torch.randn(len(tokens_T), 32, generator=torch.Generator().manual_seed(1))
    found = []
    for kind in (mode, "reference"):
        model = Model(CONFIG, kind).initialize(0)  # type: ignore[arg-type]
        with torch.no_grad():
            served_TD = model(tokens_T, Layout(lengths, prefixes=prefixes))
        out_TD = model(tokens_T, Layout(lengths, prefixes=prefixes))
        (out_TD * target_TD).sum().backward()
        grad = model.layers[0].attention.qkv.weight.grad
        assert grad is not None
        torch.testing.assert_close(out_TD, served_TD, rtol=1e-4, atol=1e-4)
        found.append((out_TD.detach(), grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)


def test_prompts_are_laid_out_as_in_training() -> None:
    infilling = CONFIG.infilling
    assert infilling is not None
    tokens, blanks = with_blanks(TEXT, infilling)
    assert tokens == [*TEXT, START] and blanks.total == 6
    assert [blanks.position(place) for place in range(9)] == [0, 1, 2, 3, 4, 5, 2, 3, 4]  # on from the mask
    tokens, blanks = with_blanks([4, 9], infilling)  # an ordinary prompt is continued
    assert tokens == [4, 9, REST, START] and [blanks.position(place) for place in range(2, 6)] == [2, 2, 3, 4]
    tokens, blanks = with_blanks([MASK, 9, MASK, START, 5, END, START], infilling)  # the second blank
    assert [blanks.position(place) for place in range(3, 8)] == [0, 1, 2, 2, 3]


@torch.no_grad()
@pytest.mark.parametrize("text", [TEXT, [4, 9, 11], [*range(1, 50), MASK, *range(1, 30)]])
def test_the_engine_fills_blanks_as_one_forward_does(text: list[int]) -> None:
    """Greedy tokens and their log-probabilities, from pages and in steps, beside another request."""
    model = Model(CONFIG).initialize(0)
    engine = Engine(model, page_size=4, policy=Chunked(tokens=16))  # which would take the longest in parts
    done, _ = engine.generate([text, [8, 8, 8]], max_tokens=6, temperature=0.0)
    assert model.config.infilling is not None
    prompt, blanks = with_blanks(text, model.config.infilling)
    tokens = [*prompt, *done.tokens]
    positions_T = torch.tensor([blanks.position(place) for place in range(len(tokens))])
    layout = Layout([len(tokens)], positions=positions_T, prefixes=[blanks.total])
    logprobs_TV = model.logits_at(model(torch.tensor(tokens), layout)).log_softmax(-1)[len(prompt) - 1 : -1]
    assert logprobs_TV.argmax(-1).tolist() == done.tokens
    expected = logprobs_TV.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([one.logprob for one in done.logprobs]), expected, rtol=1e-4, atol=1e-4)


def objective(**options: float) -> BlankInfilling:
    made = BlankInfilling(**options)  # type: ignore[arg-type]
    made._marks.update(mask=MASK, rest_mask=REST, sentence_mask=55, start=START, end=END)
    return made


def test_training_sees_part_a_both_ways() -> None:
    """The loss of a model that fills blanks is that of a layout with a prefix, and of no causal one."""
    model, made = Model(CONFIG).initialize(0), objective(share=0.3)
    tokens_T = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens_T, shifted(tokens_T, [20], 1, IGNORED), [20], [0], 19)
    loss = made(model, batch, Routing()).total
    text, targets, positions = made.cut(tokens_T.tolist(), both_ways=True)
    prefix = text.index(START)
    losses = []
    for prefixes in ([prefix], None):
        layout = Layout([len(text)], positions=torch.tensor(positions), prefixes=prefixes)
        logits_TV = model.logits_at(model(torch.tensor(text), layout))
        losses.append(torch.nn.functional.cross_entropy(logits_TV, torch.tensor(targets), ignore_index=IGNORED))
    torch.testing.assert_close(loss, losses[0])
    assert abs(losses[1] - losses[0]) > 1e-3
    assert positions[:prefix] == list(range(prefix))  # which do not tell how long a blank is


def test_masks_are_drawn_as_glm_130b_does() -> None:
    """Of seven in ten the end is cut off, of any length alike; of the others short spans, 15 % together."""
    made = objective(rest=0.7)
    cut = []
    for seed in range(600):
        tokens = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        text, targets, _ = made.cut(tokens, both_ways=True)
        cut.append((REST in text, sum(target not in (IGNORED, END) for target in targets)))
    rest = [length for is_rest, length in cut if is_rest]
    short = [length for is_rest, length in cut if not is_rest]
    assert len(rest) / len(cut) == pytest.approx(0.7, abs=0.05)
    assert sum(rest) / len(rest) == pytest.approx(20.5, abs=1.5) and min(rest) < 3 and max(rest) == 40
    assert sum(short) / len(short) == pytest.approx(6, abs=0.3)


def test_sentences_are_cut_out_whole() -> None:
    made = objective(sentences=1.0, share=0.3)
    made._sentence_ends.add(49)
    tokens = [number if number % 7 else 49 for number in range(1, 43)]
    text, targets, _ = made.cut(tokens, both_ways=True)
    spans = " ".join(map(str, targets)).split(str(END))
    found = [
        list(map(int, span.split()))
        for span in " ".join(map(str, [t for t in targets if t != IGNORED])).split(f" {END}")
    ]
    assert len(spans) == text.count(55) + 1 == 3  # two sentences of seven reach 30 % of 42
    assert all(len(span) == 7 and span[-1] == 49 for span in found if span)
