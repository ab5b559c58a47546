"""Several agents on one question: other models, methods of search or seeds, and one decision by learned trust.

    Agents({"words": Answerer(ByMethod(base, "words"), writer), "mutual": Answerer(ByMethod(base, "mutual"), writer)})

An agent's short answer counts more where its own cited answer is supported by what it cites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.know.answer.answer import Answer
from moesaic.know.answer.answering import Answerer
from moesaic.know.answer.trust import Decision, TrustNetwork


@dataclass
class Agents:
    answerers: Mapping[str, Answerer]
    network: TrustNetwork = field(default_factory=TrustNetwork)

    def ask(self, question: str) -> tuple[Decision, dict[str, Answer]]:
        """The decision, and each agent's own answer with its citations. Tell `network` the truth where it is known."""
        answers = {name: answerer.answer(question) for name, answerer in self.answerers.items()}
        short = {
            name: self.answerers[name].short([question])[0] for name, answer in answers.items() if not answer.abstained
        }
        supported = {name: bool(answer.citations) and not answer.unsupported for name, answer in answers.items()}
        return self.network.decide(short, supported), answers
