"""What each drafter guesses, judged by counting, by a whole forward, and by a clock that charges for every row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesaic
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.drafters._cost import ForwardCost
from moesaic.serve.core.drafters._suffix_tree import MAX_MATCH, MIN_PROBABILITY, SuffixTree, expand
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.router import CREDIT, DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from tests.model.test_mtp import checkpoint
from tests.serve.tiny import LayerClock, tiny_model

TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=40)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


# Suffix trees


@given(TOKENS, TOKENS)
def test_the_longest_match_is_found(before: list[int], text: list[int]):
    """Against a search through all places, where the index knows the end of the text at all."""
    seen = SuffixTree()
    seen.add(before, 0, len(before))
    ends = {
        place: max(
            n for n in range(min(place, len(text), MAX_MATCH) + 1) if text[len(text) - n :] == before[place - n : place]
        )
        for place in range(1, len(before))
    }
    longest = max(ends.values())
    found = {place.number: place.length for place in seen.match(text)}
    assert max(found.values(), default=0) == longest
    assert found.items() <= ends.items()


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(1, 12))
def test_trees_of_guesses_were_all_seen(texts: list[list[int]], end: list[int], budget: int):
    seen = SuffixTree()
    for text in texts:
        seen.add(text, 0, len(text))
    draft = expand(seen.match(end), budget)
    assert len(draft) <= budget
    chances: list[float] = []
    for node, parent in enumerate(draft.parents):
        assert parent < node and draft.child(parent, draft.tokens[node]) == node  # no guess twice
        chances.append(draft.confidence[node] * (chances[parent] if parent >= 0 else 1.0))
        line, at = [draft.tokens[node]], parent
        while at >= 0:
            line, at = [draft.tokens[at], *line], draft.parents[at]
        wanted = [end[-1], *line]
        assert any(text[i : i + len(wanted)] == wanted for text in texts for i in range(len(text)))
    assert chances == sorted(chances, reverse=True)  # best first
    assert all(chance >= MIN_PROBABILITY for chance in chances)


def test_counts_decide():
    seen = SuffixTree()
    for text in ([1, 2, 3, 7], [1, 2, 3, 8, 5], [1, 2, 3, 8, 6], [1, 2, 3, 8, 5]):
        seen.add(text, 0, len(text))
    draft = expand(seen.match([9, 1, 2, 3]), 4)
    assert draft.tokens == [8, 5, 7, 6] and draft.parents == [-1, 0, -1, 0]
    assert draft.best_line().tokens == [8, 5]
    assert draft.keep([0, 2]) == Draft([8, 7], [-1, -1], [draft.confidence[0], draft.confidence[2]])
    assert draft.confidence[0] == pytest.approx(3 * draft.confidence[2])


def test_what_was_seen_once_is_never_as_sure_as_what_was_seen_again():
    """However long the match: one answer that was drawn says little about the next one."""
    said = list(range(1, 30))
    seen = SuffixTree()
    seen.add(said, 0, len(said))
    once = expand(seen.match(said[:20]), 4)
    seen.add(list(said), 0, len(said))
    exact_forward = expand(seen.match(said[:20]), 4)
    assert once.tokens == exact_forward.tokens == said[20:24]
    assert max(once.confidence) < 0.9 < min(exact_forward.confidence)


def test_answers_to_a_prompt_are_remembered_for_its_next_request(model):
    """As rollouts of one prompt do: the second answer is guessed from the first, and not across tenants."""
    engine = Engine(model, drafter=DraftRouter.over(Suffix(), always=True))
    prompt, steps = [5, 17, 40, 3], []
    for salt in ("one", "one", "two"):
        request = engine.request(prompt, greedy(40), salt=salt)
        engine.add(request)
        before = engine.counts.steps
        while request.finish_reason is None:
            engine.step()
        steps.append(engine.counts.steps - before)
    assert steps[1] < 5  # one token, then 39 from guesses
    assert steps[2] == steps[0] > steps[1]


def test_memory_is_bounded(model):
    suffix = Suffix(tokens=300)
    engine = Engine(model, drafter=DraftRouter.over(suffix, always=True))
    for number in range(30):
        engine.generate([[number + 1, *range(20, 40)]] * 2, max_tokens=12, temperature=1.0, ignore_eos=True)
        assert suffix.size == sum(tree.size for tree in suffix.trees.values()) <= 300
    assert len(suffix.trees) > 1


def greedy(tokens: int) -> Any:
    from moesaic.serve.core.request import Sampling

    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


# Prediction layers


class Recorded(PredictionLayers):
    def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
        drafts = super().draft(requests, most)
        self.log = [*getattr(self, "log", []), *((list(r.tokens), d.tokens) for r, d in zip(requests, drafts))]
        return drafts


def whole_guesses(model: Model, tokens: list[int], count: int) -> list[int]:
    """The same guesses without a cache: every layer over the whole sequence each time."""
    known, layers = list(tokens), len(model.mtp)
    with torch.inference_mode():
        main_TD = model(torch.tensor(tokens), Layout([len(tokens)]))[:-1]
        for guess in range(count):
            hidden_TD = main_TD
            for layer in range(min(guess + 1, layers)):
                if layer == layers - 1 and guess >= layers:
                    # The last layer feeds itself: its own output takes the place of what it would have been given.
                    given_TD = hidden_TD
                    for _ in range(guess - layers + 2):
                        out_TD = further(model, layer, given_TD, known)
                        given_TD = torch.cat([hidden_TD, out_TD[len(hidden_TD) - 1 :]])
                    hidden_TD = out_TD
                else:
                    hidden_TD = further(model, layer, hidden_TD, known)
            known.append(int(model.logits_at(hidden_TD[-1:]).argmax()))
    return known[len(tokens) :]


def further(model: Model, layer: int, hidden_TD: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    follow = torch.tensor(tokens[layer + 1 : layer + 1 + len(hidden_TD)])
    places = torch.arange(layer + 1, layer + 1 + len(follow))
    return model.predict_further(layer, hidden_TD[: len(follow)], follow, Layout([len(follow)], positions=places))


@pytest.mark.parametrize(("kind", "layers"), [("glm4_moe", 1), ("deepseek_v3", 2), ("glm_moe_dsa", 1)])
def test_prediction_layers_guess_what_a_whole_forward_would(kind, layers, tmp_path):
    checkpoint(kind, layers, tmp_path / "model")
    model = moesaic.load(tmp_path / "model", threads=1)
    drafter = Recorded(length=4)
    engine = Engine(model, page_size=4, drafter=DraftRouter.over(drafter, always=True))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (6, 1, 11)]
    for _ in range(2):
        engine.generate(prompts, max_tokens=14, temperature=0.0, ignore_eos=True)
        drafter.log, log = [], drafter.log
        assert len(log) > 20
        for tokens, draft_tokens in log:
            assert draft_tokens == whole_guesses(model, tokens, len(draft_tokens))
    assert engine.page_pool.hits > 0  # the second time from shared pages


# The router


class Fixed(Drafter):
    """Guesses right where `right` says so, by knowing the answer."""

    def __init__(self, answer: Sequence[int], right: float, seconds: float = 0.0, sure: float = 0.9) -> None:
        self.answer, self.right, self.asked, self.sure = list(answer), right, 0, sure
        self.seconds, self.instant = seconds, not seconds  # for each guess

    def start(self, engine: Engine) -> None:
        self.clock = engine.clock

    def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
        self.asked += 1
        if self.seconds:
            self.clock.advance(most * self.seconds + (3.0 if self.asked == 1 else 0.0))  # at first it reads the prompt
        drafts = []
        for request in requests:
            ahead = self.answer[request.written : request.written + most]
            generator = torch.Generator().manual_seed(request.written)
            wrong = torch.rand(len(ahead), generator=generator) >= self.right
            tokens = [(token + 1) % 97 if miss else token for token, miss in zip(ahead, wrong.tolist())]
            drafts.append(Draft.line(tokens, [self.sure] * len(tokens)))
        return drafts


def seconds(model: Model, drafter: Drafter | None, base: float, per_token: float, tokens: int = 200) -> float:
    """What an answer takes on a machine of this kind."""
    clock = LayerClock(model, base, per_token)
    engine = Engine(model, drafter=drafter, clock=clock)
    engine.add(engine.request([1, 2, 3], greedy(tokens)))
    clock.run(engine)
    return clock.now


@pytest.fixture(scope="module")
def answer(model: Model) -> list[int]:
    return moesaic.Engine(model).generate([[1, 2, 3]], max_tokens=200, temperature=0.0, ignore_eos=True)[0].tokens


# A pass of one row, and what each row adds: a GPU, a CPU that streams weights once, one that streams them for each row.
MACHINES = {"rows are free": (1.0, 0.01), "rows cost a little": (0.8, 0.2), "rows cost as much": (0.02, 1.0)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.95])
def test_never_much_slower_and_faster_where_it_can_be(machine, right, model, answer):
    base, per_token = MACHINES[machine]
    plain = seconds(model, None, base, per_token)
    drafted = seconds(model, Fixed(answer, right), base, per_token)
    assert plain / drafted > 0.95
    if right == 0.95 and machine != "rows cost as much":
        # The best there could be, were the chances and costs known from the start: so many guesses each time.
        cost = lambda rows: (base + rows * per_token) / (base + per_token)  # noqa: E731
        best = max(sum(right**i for i in range(n + 1)) / cost(n + 1) for n in range(40))
        assert plain / drafted > 0.5 * best  # learning from nothing, within one answer
    if right >= 0.6 and machine == "rows are free":
        assert plain / drafted > 1.5


def test_a_pass_that_something_else_delayed_is_no_debt_for_ever(model, answer):
    """As on a machine with other work: the first pass with guesses takes ten minutes."""
    clock = LayerClock(model, 1.0, 0.01)
    engine = Engine(model, drafter=Fixed(answer, 0.95), clock=clock)
    delays: list[float] = []

    def delay(layer: object, given: object, out: object) -> None:
        if engine.counts.drafted_tokens and not delays:
            delays.append(600.0)
            clock.advance(600.0)

    hook = model.layers[0].register_forward_hook(delay)
    engine.add(engine.request([1, 2, 3], greedy(12)))
    clock.run(engine)
    hook.remove()
    assert delays and isinstance(engine.drafter, DraftRouter)
    assert -CREDIT <= engine.drafter.balance < 0


def test_a_cpu_is_given_lines(model):
    """Whole layers run as one piece where nothing branches; a router that is to guess in any case may branch."""
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    for always in (False, True):
        suffix = Suffix()
        engine = Engine(model, drafter=DraftRouter.over(suffix, always=always))
        for text in texts:
            suffix.trees.setdefault(("now", ""), SuffixTree()).add(text, 0, len(text))
        request = engine.request([9, 1, 2, 3], greedy(4))
        engine.drafter.cost.note(1, 0, 1.0)
        engine.drafter.cost.note(1, 0, 1.0)
        engine.drafter.draft([request], 8)
        (proposal,) = engine.drafter.proposals.values()
        assert proposal.draft.is_line == (not always) and len(proposal.draft)


def test_the_better_drafter_is_taken(model, answer):
    good, bad = Fixed(answer, 0.95), Fixed(answer, 0.1)
    engine = Engine(model, drafter=DraftRouter.over(bad, good), clock=LayerClock(model, 1.0, 0.01))
    engine.add(engine.request([1, 2, 3], greedy(150)))
    while engine.working:
        engine.step()
    proposals = [candidate.acceptance.depth[0].drafted for candidate in engine.drafter.candidates]
    assert proposals[1] > 5 * proposals[0]
    assert engine.counts.accepted_tokens > 0.6 * engine.counts.drafted_tokens


def test_a_dear_drafter_that_fails_is_not_asked_again_and_again(model, answer):
    plain = seconds(model, None, 1.0, 0.01)
    bad, good = Fixed(answer, 0.0, seconds=0.3), Fixed(answer, 0.95, seconds=0.3)
    assert plain / seconds(model, bad, 1.0, 0.01) > 0.95
    assert 1 <= bad.asked < 25
    assert plain / seconds(model, good, 1.0, 0.01) > 1.5


@pytest.mark.parametrize("right", [0.0, 0.95])
def test_it_rests_where_waiting_for_every_step_costs_more_than_guesses_win(model, answer, right):
    """As on a GPU, where a step that is waited for takes a third longer than one that is queued."""
    clock = LayerClock(model, 1.0, 0.01)
    engine = Engine(model, drafter=DraftRouter.over(Fixed(answer, right)), clock=clock)
    router = engine.drafter
    engine.add(engine.request([1, 2, 3], greedy(150)))
    queued = clock.layer_seconds(1) * len(model.layers) / 1.33
    assert router.rests(1), "until it is known what is lost"
    waited = rested = 0
    while engine.working and waited < 80:
        if router.rests(1):
            router.rested(1, queued)
            rested += 1
        else:
            engine.step()
            waited += 1
    assert (rested > 5 * waited) if right == 0.0 else (rested < 20)


def test_one_that_must_see_everything_does_not_rest(model):
    router = DraftRouter.over(PredictionLayers())
    router.balance = -1.0
    assert not router.rests(1)


def test_cost_of_sizes_between_and_beyond():
    cost = ForwardCost()
    for draft_tokens, took in ((0, 1.0), (0, 9.0), (4, 3.0), (8, 4.0)):
        cost.note(1, draft_tokens, took)
    assert cost.plain(1) == cost.seconds(1, 0) == 1.0 and cost.seconds(1, 2) == 2.0 and cost.seconds(1, 6) == 3.5
    assert cost.seconds(1, 9) > 4.0  # near what is known it is dearer
    assert cost.seconds(1, 14) < 4.0  # far from it, worth a try
    assert cost.plain(2) is None
    for first, second in pairwise(range(1, 8)):
        assert cost.seconds(1, first) <= cost.seconds(1, second)
    for _ in range(64):
        cost.note(1, 4, 3.0)
    assert cost.plain(1) is None  # contexts have grown: measure anew


@pytest.mark.parametrize(("right", "least", "most"), [(0.95, 0.0, 0.92), (0.05, 1.0, 1.08)], ids=["right", "wrong"])
def test_a_drafter_that_is_unsure_is_heard(model, answer, right, least, most):
    """Where a row costs a third of a forward, no draft token of a confidence of 0.07 pays by what it says of itself.
    Whether it is mostly right all the same shows when some are verified, and that is soon given up where it is not."""
    plain = seconds(model, None, 0.6, 0.3)
    drafted = seconds(model, Fixed(answer, right, seconds=0.2, sure=0.07), 0.6, 0.3)
    assert least < drafted / plain < most


def test_guesses_go_to_the_requests_that_use_them(model):
    """Of four requests side by side, two are foreseen and two are not."""
    prompts, wishes = [[number, 2, 3] for number in range(1, 5)], greedy(120)
    answers = {
        tuple(prompt): answer.tokens
        for prompt, answer in zip(
            prompts, Engine(model).generate(prompts, max_tokens=120, temperature=0.0, ignore_eos=True)
        )
    }

    class Half(Drafter):
        instant = True
        given = {number: 0 for number in range(1, 5)}

        def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
            lines = [answers[tuple(r.prompt)][r.written : r.written + most] for r in requests]
            wrong = [[(token + 1) % 97 for token in line] for line in lines]
            return [
                Draft.line(line if request.prompt[0] < 3 else miss, [0.8] * len(line))
                for request, line, miss in zip(requests, lines, wrong)
            ]

        def observe(self, done: Any, hidden_TD: torch.Tensor) -> None:
            for share in done.chunks:
                self.given[share.request.prompt[0]] += len(share.draft or ())

    took = []
    for drafter in (None, Half()):
        clock = LayerClock(model, 0.8, 0.05)
        engine = Engine(model, drafter=drafter, clock=clock)
        requests = [engine.request(prompt, wishes) for prompt in prompts]
        for request in requests:
            engine.add(request)
        clock.run(engine)
        assert [r.tokens[3:] for r in requests] == list(answers.values())
        took.append([request.last_token for request in requests])
    assert Half.given[1] + Half.given[2] > 4 * (Half.given[3] + Half.given[4])
    assert all(drafted < 0.6 * plain for plain, drafted in zip(*(ends[:2] for ends in took)))
    assert all(drafted < 1.05 * plain for plain, drafted in zip(*took))
