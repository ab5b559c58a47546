"""Objectives: the losses are what their papers say, and parts of a batch add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data.packing import IGNORED, Batch
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe_sections import BalanceSection
from moesaic.train.balance import Balance, sequence_loss
from moesaic.train.objectives import shifted
from moesaic.train.objectives.blank_infilling import BlankInfilling
from moesaic.train.objectives.next_token import NextToken
from tests.train.small import small_mixture

MIXTURE = Layer(Experts(count=4, per_token=2, hidden=16, score="sigmoid", correction=True))
CONFIG = small_mixture(60, 24, GroupedQuery(2, 1, 12), Rope(6), [Layer(Dense(32)), MIXTURE], mtp=(MIXTURE, MIXTURE))


def batch(lengths: list[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 57, (sum(lengths),), generator=generator)
    targets = shifted(tokens, lengths, 1, IGNORED)
    return Batch(tokens, targets, lengths, [0] * len(lengths), sum(lengths) - len(lengths))


def test_shifted_stays_within_sequences():
    values = torch.arange(9)
    assert shifted(values, [4, 1, 4], 1, -1).tolist() == [1, 2, 3, -1, -1, 6, 7, 8, -1]
    assert shifted(values, [4, 1, 4], 3, -1).tolist() == [3, -1, -1, -1, -1, 8, -1, -1, -1]
    assert shifted(values, [4, 1, 4], 7, -1).tolist() == [-1] * 9


def test_next_token_is_the_mean_cross_entropy():
    model = Model(CONFIG).initialize(1)
    examples = batch([7, 1, 12])
    loss = NextToken(mtp_weight=0.0)(model, examples, Routing())
    logits = model.logits_at(model(examples.tokens_T, Layout(examples.lengths)))
    torch.testing.assert_close(loss.total, F.cross_entropy(logits, examples.targets_T, ignore_index=IGNORED))


def test_prediction_layers_learn_the_tokens_after_the_next():
    """Written out for one sequence: layer k reads hidden i and token i+1+k, and should say token i+2+k."""
    model = Model(CONFIG).initialize(1)
    examples = batch([10])
    tokens = examples.tokens_T
    loss = NextToken(mtp_weight=0.5)(model, examples, Routing())
    hidden, layout = model(tokens, Layout([10])), Layout([10])
    expected = F.cross_entropy(model.logits_at(hidden[:9]), tokens[1:])
    for number in range(2):
        following = F.pad(tokens[1 + number :], (0, 1 + number))
        hidden = model.predict_further(number, hidden, following, layout)
        rows = 10 - 2 - number
        further = F.cross_entropy(model.logits_at(hidden[:rows]), tokens[2 + number :], reduction="sum") / 9
        torch.testing.assert_close(loss.parts[f"mtp{number + 1}"], further)
        expected = expected + 0.25 * further
    torch.testing.assert_close(loss.total, expected)


@pytest.mark.parametrize("mtp_weight", [0.0, 0.3])
def test_gradients_of_parts_add_up(mtp_weight):
    model = Model(CONFIG).initialize(1)
    whole, objective = batch([9, 5, 3, 14, 2]), NextToken(mtp_weight=mtp_weight)
    objective(model, whole, Routing()).total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for part in whole.parts(3):
        objective(model, part, Routing()).total.backward()
    for name, p in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def infilling(**options) -> BlankInfilling:
    objective = BlankInfilling(**options)
    objective._marks.update(mask=57, start=58, end=59)
    return objective


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 80), st.floats(0.05, 0.6), st.integers(0, 1000))
def test_blanks_put_back_give_the_text(length, share, seed):
    """Whatever is cut, filling every mask with its span in turn restores the text, and positions match it."""
    tokens = torch.randint(0, 57, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    text, targets, positions = infilling(share=share, mean_span=3.0, seed=seed).cut(tokens)
    assert len(text) == len(targets) == len(positions)
    first = text.index(58) if 58 in text else len(text)
    spans, at = {}, first
    while at < len(text):
        assert text[at] == 58 and targets[at] != IGNORED
        end = targets.index(59, at)
        spans[positions[at]] = targets[at:end]
        assert text[at + 1 : end + 1] == targets[at:end] == tokens[positions[at] : positions[at] + end - at]
        assert positions[at : end + 1] == list(range(positions[at], positions[at] + end - at + 1))
        at = end + 1
    restored: list[int] = []
    for token, place in zip(text[:first], positions[:first]):
        restored += spans.pop(place) if token == 57 else [token]
    assert restored == tokens and not spans
    assert all(target == IGNORED for target in targets[:first])
    assert text.count(57) == text.count(58) >= 1


def test_spans_are_written_in_random_order():
    """A span then sees others that stand before and after it: the model learns both ways of depending on each other."""
    rising = falling = 0
    for seed in range(20):
        tokens = torch.randint(0, 57, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        text, _, positions = infilling(share=0.3).cut(tokens)
        begins = [place for token, place in zip(text, positions, strict=True) if token == 58]
        rising += sum(later > earlier for earlier, later in pairwise(begins))
        falling += sum(later < earlier for earlier, later in pairwise(begins))
    assert 0.35 < falling / (rising + falling) < 0.65


def test_a_span_stands_where_its_mask_stood():
    """Its first token, written behind the start mark, has the mask's position."""
    text, _, positions = infilling(share=0.3).cut(list(range(40)))
    masks = [place for token, place in zip(text, positions, strict=True) if token == 57]
    begins = [place for token, place in zip(text, positions, strict=True) if token == 58]
    assert sorted(begins) == masks and len(masks) > 2


def test_blanks_are_about_the_share_asked_for():
    tokens = torch.randint(0, 57, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    text, targets, _ = infilling(share=0.15).cut(tokens)
    blanks = sum(target not in (IGNORED, 59) for target in targets)
    assert blanks / 4000 == pytest.approx(0.15, abs=0.01)
    assert blanks / text.count(57) == pytest.approx(3.0, abs=0.4)


def test_infilling_loss_is_the_mean_over_the_blanks():
    model, objective = Model(CONFIG).initialize(1), infilling(share=0.3)
    examples = batch([20])
    loss = objective(model, examples, Routing())
    text, targets, positions = objective.cut(examples.tokens_T.tolist())
    hidden = model(torch.tensor(text), Layout([len(text)], positions=torch.tensor(positions)))
    expected = F.cross_entropy(model.logits_at(hidden), torch.tensor(targets), ignore_index=IGNORED)
    torch.testing.assert_close(loss.total, expected)


def test_the_sequence_loss_holds_for_texts_with_blanks_too():
    model, objective, examples = Model(CONFIG).initialize(1), infilling(share=0.3), batch([20, 9])
    balance = Balance(model, BalanceSection(sequence_loss=1.0))
    routing = balance.routing()
    objective(model, examples, routing)
    cut = [len(objective.cut(tokens.tolist())[0]) for tokens in examples.tokens_T.split(examples.lengths)]
    expected = sequence_loss(routing.logits[1], routing.choices[1], cut, CONFIG.layers[1].ffn)
    torch.testing.assert_close(balance.losses(routing, 1.0)["sequence"], expected)


def test_infilling_losses_of_parts_are_shares_of_one():
    model, objective = Model(CONFIG).initialize(1), infilling(share=0.3)
    examples = batch([4, 4, 4, 4, 4, 4])
    parts = examples.parts(3)
    means = [objective(model, replace(part, count=4 * 2 - 2), Routing()).total for part in parts]
    loss = sum(objective(model, part, Routing()).total for part in parts)
    torch.testing.assert_close(loss, torch.stack(means).mean())


@pytest.mark.parametrize("objective", [NextToken(), "infilling"], ids=["next", "infilling"])
def test_single_tokens_teach_nothing(objective):
    model = Model(CONFIG).initialize(1)
    loss = (infilling(share=0.3) if objective == "infilling" else objective)(model, batch([1, 1]), Routing())
    loss.total.backward()
    assert loss.total == 0 and not model.head.grad.any()
