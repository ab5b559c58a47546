"""The logical-form solver without any model, over the texts of generated worlds of the test split: how often plans by
patterns and the right plans (of the question's program) come to the right answer, by phrasings; beside them the right
plans over the worlds' own triples, where only the executor can be wrong. Of questions that have an answer.

    python -m bench.know_solver                  # about a minute of one core
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

from moesaic.data.tasks.multihop import KINDS, world
from moesaic.evaluate.interval import wilson
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.language.parse import parse
from moesaic.know.solver.plans import plan_by_patterns, plan_of
from moesaic.know.solver.solve import Solver


def measured(phrasings: int, worlds: int) -> dict[str, Any]:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for seed in range(worlds):
        made = world(seed, split="test", people=14, hops=(1, 2, 3), kinds=KINDS[:-1], phrasings=phrasings, questions=3)
        with KnowledgeBase.of_texts(made.documents) as base:
            texts, triples = Solver(base), Solver(base, triples=made.triples)
            for question in made.questions:
                plan = plan_of(parse(question.program))
                pattern = plan_by_patterns(question.text)
                answers = {
                    "right plan, triples": triples.run(question.text, plan).answer,
                    "right plan, texts": texts.run(question.text, plan).answer,
                    "patterns, texts": texts.run(question.text, pattern).answer if pattern else "unknown",
                }
                for way, answer in answers.items():
                    asked[way] += 1
                    right[way] += answer in (question.answer, *question.aliases)
                    wrong[way] += answer not in (question.answer, *question.aliases, "unknown")
    return {
        way: {
            "right": round(right[way] / count, 4),
            "interval": [round(bound, 4) for bound in wilson(right[way], count)],
            "wrong, not unknown": round(wrong[way] / count, 4),
            "questions": count,
        }
        for way, count in asked.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=8)
    arguments = parser.parse_args()
    for phrasings in (1, 2, 4):
        began = time.process_time()
        found = measured(phrasings, arguments.worlds)
        print(json.dumps({"phrasings": phrasings, **found, "cpu_seconds": round(time.process_time() - began, 1)}))


if __name__ == "__main__":
    main()
