"""Question to program by a tiny model, with and without semantic anchors: the share of questions of held-out worlds
whose program, executed over the world's facts, gives the right answer.

    python -m bench.know_language --out out/know_language                 # about ten minutes of one core
    python -m bench.know_language --steps 30 --worlds 20 --tests 2        # whether it runs

Two models of the same size are trained for the same number of steps: plain (question, program) and anchors (question,
anchors, program). Each is asked without a grammar, with the language's grammar over the graph's relations, and with the
grammar of the question's anchors.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import moesaic
from moesaic.align.align import align
from moesaic.data.tasks.multihop import Question, World, world
from moesaic.errors import UserError
from moesaic.evaluate.interval import wilson
from moesaic.know.answer.writer import Form
from moesaic.know.answer.writers import EngineWriter
from moesaic.know.language.anchors import Anchors, Lexicon, Names, anchors_of
from moesaic.know.language.examples import STYLES, Style, asked, write
from moesaic.know.language.execute import Facts, answer_text, execute
from moesaic.know.language.grammar import grammar
from moesaic.know.language.parse import parse
from moesaic.recipe import load_recipe
from moesaic.train.pretrain import pretrain

OPTIONS: dict[str, Any] = {"people": 10, "hops": (1, 2, 3), "phrasings": 2, "questions": 6, "distractors": 2}
RECIPE = """
model: {family: glm4_moe, vocab: 1024, hidden: 96, layers: 3, heads: 4, kv_heads: 2, head_size: 24, dense_layers: 1,
  dense_hidden: 288, experts: 8, experts_per_token: 2, expert_hidden: 96, shared_experts: 1, context: 256, tied: true}
data: {sources: [{name: questions, path: TEXT}], sequence_length: 256}
train: {steps: 20, batch_tokens: 2048, warmup_steps: 5, save_every: 20, seed: 0}
align:
  stages:
    - {name: sft, steps: STEPS, lr: 0.01, data: [{path: CHATS}], batch_tokens: 2048, max_length: 256, save_every: 200}
optimizer: {name: muon, lr: 0.01, weight_decay: 0.01}
schedule: {name: wsd, decay: 0.4}
"""


def trained(style: Style, arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    out = arguments.out / f"{style}-{arguments.steps}"
    chats, text, recipe = (out.with_suffix(end) for end in (".jsonl", ".txt", ".yaml"))
    count = write(chats, range(arguments.worlds), style, **OPTIONS)
    lines = [json.loads(line)["messages"] for line in chats.read_text().splitlines()[:4000]]
    text.write_text("".join(f"{question['content']}\n{answer['content']}\n\n" for question, answer in lines))
    filled = RECIPE.replace("TEXT", str(text)).replace("CHATS", str(chats)).replace("STEPS", str(arguments.steps))
    recipe.write_text(filled)
    base, began = out.with_suffix(".base"), time.process_time()
    loaded = load_recipe(str(recipe))
    pretrain(loaded, base, quiet=True)
    align(loaded, base, out, quiet=True)
    return out, {"examples": count, "train_cpu_seconds": round(time.process_time() - began)}


def judged(question: Question, text: str, facts: Facts) -> bool:
    """By what it comes to; a program of another form may be right as well. One about things that are not there is not,
    though it finds nothing, which can be the right answer."""
    try:
        program = parse(text)
    except UserError:
        return False
    there = facts.names.issuperset(anchors_of(text).names)
    return there and answer_text(execute(program, facts)) in (question.answer, *question.aliases)


def measured(style: Style, directory: Path, tests: list[World], lexicon: Lexicon) -> dict[str, Any]:
    writer = EngineWriter(moesaic.load(directory))
    found: dict[str, Any] = {}
    for constraint in ("none", "grammar", "anchors"):
        right: list[bool] = []
        by_kind: dict[str, list[bool]] = {}
        valid = 0
        began = time.process_time()
        for made in tests:
            facts = Facts.of(made.triples)
            finder = Anchors(facts.names, facts.relations, lexicon)
            for question in made.questions:
                about = asked(question.text, finder)
                form = None
                if constraint == "grammar" and style == "plain":
                    form = Form(grammar=grammar(None, facts.relations, simple=True))
                elif constraint == "anchors":
                    form = Form(grammar=about.grammar(finder.find(question.text).relations, style))
                elif constraint == "grammar":
                    form = Form(grammar=about.grammar(facts.relations, style))
                (text,) = writer.write([[{"role": "user", "content": about.text}]], max_tokens=120, form=form)
                program = about.program(text.strip(), style)
                right.append(judged(question, program, facts))
                valid += parses(program)
                by_kind.setdefault(question.kind, []).append(right[-1])
        low, high = wilson(sum(right), len(right))
        found[constraint] = {
            "execution_accuracy": round(sum(right) / len(right), 4),
            "interval": [round(low, 4), round(high, 4)],
            "valid_programs": round(valid / len(right), 4),
            "by_kind": {kind: round(sum(own) / len(own), 3) for kind, own in by_kind.items()},
            "questions": len(right),
            "cpu_seconds": round(time.process_time() - began, 1),
        }
        print(style, constraint, json.dumps(found[constraint]), flush=True)
    return found


def parses(text: str) -> bool:
    try:
        parse(text)
    except UserError:
        return False
    return True


def learned_lexicon(seeds: range) -> Lexicon:
    pairs = []
    for seed in seeds:
        made = world(seed, **OPTIONS)
        names = Names({name for subject, _, value in made.triples for name in (subject, value)})
        pairs += [(names.without(question.text), question.program) for question in made.questions]
    return Lexicon.learn(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/know_language"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--tests", type=int, default=6)
    parser.add_argument("--styles", nargs="*", choices=STYLES, default=list(STYLES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tests = [world(seed, split="test", **OPTIONS) for seed in range(arguments.tests)]
    lexicon = learned_lexicon(range(40))
    results: dict[str, Any] = {}
    for style in arguments.styles:
        directory, about = trained(style, arguments)
        results[style] = about | measured(style, directory, tests, lexicon)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
