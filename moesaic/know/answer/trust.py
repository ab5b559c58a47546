"""Trust among agents: answers of several, weighed by what each has been worth so far, and by who goes with whom.

    network = TrustNetwork()
    verdict = network.decide({"a": "Paris", "b": "Lyon", "c": "Lyon"})
    network.verified("Paris")                 # where the truth comes to be known; else what others say has to do

After "Trustworthy Agent Network" (trust belongs to how agents work together from the beginning): an agent's weight is
the log-odds of its reliability (Dawid and Skene's model, one number an agent), learned online. Two things are learned
of outcomes: how often an agent is right, and which agents are wrong *together*. Those that agree on what turns out
wrong far more often than chance explains are one voice and not many, which is what defeats a majority vote when liars
collude. So are near-copies, where no outcome is known. What others say counts for little beside what was verified, or
a majority of liars would confirm itself. An answer that its citations support begins with a head start.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

PRIOR = (2.0, 1.0)  # right and wrong outcomes that a new agent is taken to have had
MOST_WEIGHT = 4.0  # log-odds; nobody decides alone for ever
DECAY = 0.99  # of an outcome's worth with each new one: agents change
COLLUSION = 3.0  # standard deviations above chance at which two agents are one voice
EVIDENCE = 1.0  # log-odds that supported citations add
AGREEMENT = 2.0  # outcomes that agreement with others is worth at most
COPIES = 0.8  # share of the same answers from which two agents are near-copies, if others agree less
ROUNDS = 20  # before near-copies are told


@dataclass(frozen=True)
class Decision:
    answer: str
    confidence: float  # the share of the weight that is behind it
    weights: Mapping[str, float]  # of each agent in this decision
    groups: tuple[tuple[str, ...], ...]  # agents that were counted as one voice


@dataclass
class TrustNetwork:
    right: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wrong: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    agreement: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    # Of each pair: outcomes of which both were wrong, in how many they said the same, and in how many by chance.
    wrong_together: defaultdict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )
    same: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    last: dict[str, str] = field(default_factory=dict)

    def reliability(self, agent: str) -> float:
        right, wrong = self.right[agent] + PRIOR[0], self.wrong[agent] + PRIOR[1]
        with_others, against = self.agreement[agent]
        share = AGREEMENT / max(AGREEMENT, with_others + against)
        return (right + share * with_others) / (right + wrong + share * (with_others + against))

    def decide(self, answers: Mapping[str, str], supported: Mapping[str, bool] | None = None) -> Decision:
        """`supported` says whose citations were found to hold."""
        said = {agent: normal(answer) for agent, answer in answers.items() if normal(answer)}
        self.last = said
        for pair in combinations(sorted(said), 2):
            self.same[pair][0] += 1.0
            self.same[pair][1] += said[pair[0]] == said[pair[1]]
        options = max(2, len(set(said.values())))
        groups = self.groups(list(said))
        weights: dict[str, float] = {}
        for group in groups:
            for answer in {said[agent] for agent in group}:
                # One voice: the best of them counts, once.
                own = [agent for agent in group if said[agent] == answer]
                best = max(own, key=self.reliability)
                for agent in own:
                    weights[agent] = self._weight(agent, options, supported or {}) if agent == best else 0.0
        totals: dict[str, float] = defaultdict(float)
        for agent, answer in said.items():
            totals[answer] += weights[agent]
        if not totals:
            return Decision("", 0.0, {}, ())
        best = max(totals, key=lambda answer: (totals[answer], answer))
        shares = {answer: math.exp(total - totals[best]) for answer, total in totals.items()}
        chosen = next(answers[agent] for agent in said if said[agent] == best)
        return Decision(chosen, shares[best] / sum(shares.values()), weights, tuple(tuple(group) for group in groups))

    def _weight(self, agent: str, options: int, supported: Mapping[str, bool]) -> float:
        """Log-odds against a wrong answer, of which there are several."""
        p = self.reliability(agent)
        weight = math.log(p * (options - 1) / (1 - p))
        weight += EVIDENCE if supported.get(agent) else 0.0
        return max(-MOST_WEIGHT, min(MOST_WEIGHT, weight))

    def verified(self, truth: str) -> None:
        """The answer to the last question came to be known."""
        truth = normal(truth)
        self._pairs(truth)
        for agent, answer in self.last.items():
            self.right[agent] = self.right[agent] * DECAY + (answer == truth)
            self.wrong[agent] = self.wrong[agent] * DECAY + (answer != truth)

    def agreed(self, decision: Decision) -> None:
        """It did not: what the other voices say stands for it, as far as they are sure."""
        for agent, answer in self.last.items():
            group = next((group for group in decision.groups if agent in group), (agent,))
            others = {a: max(0.0, w) for a, w in decision.weights.items() if a not in group}
            behind = sum(weight for a, weight in others.items() if self.last[a] == answer)
            if total := sum(others.values()):
                counts = self.agreement[agent]
                counts[0] = counts[0] * DECAY + behind / total
                counts[1] = counts[1] * DECAY + 1.0 - behind / total

    def _pairs(self, truth: str) -> None:
        """Right agents agree because there is one truth; wrong ones agree by chance, seldom, unless they talk."""
        said = self.last
        options = max(2, len(set(said.values())))
        for a, b in combinations(sorted(said), 2):
            seen = self.wrong_together[a, b]
            if said[a] != truth and said[b] != truth:
                chance = 1.0 / max(1, options - 1) if options > 2 else 0.5
                seen[0] += 1.0
                seen[1] += said[a] == said[b]
                seen[2] += chance

    def _one_voice(self, pair: tuple[str, str]) -> bool:
        rounds, agreed, chance = self.wrong_together.get(pair, (0.0, 0.0, 0.0))
        if rounds >= 3:
            return agreed - chance > COLLUSION * math.sqrt(max(chance * (1 - chance / rounds), 0.25))
        met, same = self.same.get(pair, (0.0, 0.0))
        if any(self.right.values()) or met < ROUNDS or same < COPIES * met:
            return False
        rates = sorted(same / met for met, same in self.same.values() if met >= ROUNDS)
        return same / met > rates[len(rates) // 2] + 0.2

    def groups(self, agents: Sequence[str]) -> list[list[str]]:
        """Agents that are one voice, and the others alone."""
        parent = {agent: agent for agent in agents}

        def root(agent: str) -> str:
            while parent[agent] != agent:
                agent = parent[agent]
            return agent

        for pair in combinations(sorted(agents), 2):
            if self._one_voice(pair):
                parent[root(pair[0])] = root(pair[1])
        found: dict[str, list[str]] = {}
        for agent in agents:
            found.setdefault(root(agent), []).append(agent)
        return list(found.values())


def normal(answer: str) -> str:
    """Answers that say the same are the same."""
    words = answer.casefold().replace("-", " ").split()
    return " ".join(word.strip(".,;:!?\"'()") for word in words if word not in ("the", "a", "an"))


def majority(answers: Mapping[str, str]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for answer in answers.values():
        counts[normal(answer)] += 1
    best = max(counts, key=lambda answer: (counts[answer], answer), default="")
    return next((answer for answer in answers.values() if normal(answer) == best), "")
