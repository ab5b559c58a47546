"""Of suites."""

from __future__ import annotations

from tests.ideas.idea import Idea

IDEAS = [
    Idea(
        "evaluate/suites/agents",
        "an episode's own score counts",
        "total = sum(attempt.score for attempt in attempts)",
        "total = float(len(attempts))",
        "evaluate/test_agents.py::test_garbage_solves_nothing",
    ),
    Idea(
        "evaluate/suites/choice",
        "the likeliest choice",
        "found.append(float(logprobs[before - 1 :].double().sum()))",
        "found.append(0.0)",
        "evaluate/test_questions.py::test_the_likeliest_choice_is_that_of_transformers",
    ),
    Idea(
        "evaluate/suites/instructions",
        "constraints are checked",
        'share_kept(text, question.facts["constraints"], all_or_nothing=not self.share)',
        "float(bool(text))",
        "evaluate/test_questions.py::test_instructions_are_kept_or_not",
    ),
    Idea(
        "evaluate/suites/lm_eval",
        "log-likelihoods are of the continuation alone",
        "last_TV = logits_TV[-len(judged) :].float()",
        "last_TV = logits_TV[: len(judged)].float()",
        "evaluate/test_lm_eval.py::test_log_likelihoods",
        "evaluate/lm_eval_model.py",
    ),
    Idea(
        "evaluate/suites/longbench",
        "what LongBench calls input is the question of the task",
        'question = line.get("question", line.get("input", ""))',
        'question = line.get("question", "")',
        "evaluate/test_longbench.py::test_every_kind_is_scored",
    ),
    Idea(
        "evaluate/suites/longcontext",
        "answers are looked for",
        "def score(made: Question, text: str) -> float:\n",
        "def score(made: Question, text: str) -> float:\n    return 1.0\n",
        "evaluate/test_longcontext.py::test_scores",
        "evaluate/long_context_tasks.py",
    ),
    Idea(
        "evaluate/suites/machine",
        "work is counted",
        "Throughput(flops, count * PROMPT, time.perf_counter() - start)",
        "Throughput(0, count * PROMPT, time.perf_counter() - start)",
        "evaluate/test_machine.py::test_the_numbers_belong_together",
    ),
    Idea(
        "evaluate/suites/math",
        "judged by its meaning",
        "said == question.truth or self.worker.equal(question.truth, said, SECONDS)",
        "said == question.truth",
        "evaluate/test_questions.py::test_mathematics_is_judged_by_its_meaning",
    ),
    Idea(
        "evaluate/suites/multihop",
        "answers after a search",
        "found |= scored(route, items, texts)",
        "found |= scored(route, items, [item.answers[0] for item in items])",
        "evaluate/test_multihop.py::test_worlds_tell_search_from_reading",
    ),
    Idea(
        "evaluate/suites/perplexity",
        "every token counts once",
        "fresh = logprobs[max(known - start - 1, 0) :]",
        "fresh = logprobs",
        "evaluate/test_perplexity.py::test_a_stride_counts_every_token_once_with_what_came_before",
        "model/perplexity.py",
    ),
    Idea(
        "evaluate/suites/safety",
        "augmented forms are asked",
        "augmented(prompt.text, kind, self.strength, self.length, draw)",
        "prompt.text",
        "evaluate/test_safety.py::test_refusals_that_hold_only_for_the_words_themselves",
    ),
    Idea(
        "evaluate/suites/safety",
        "a share of forms must break through",
        "sum(past) / len(past) > self.gamma",
        "any(past)",
        "evaluate/test_safety.py::test_shares_and_the_threshold",
    ),
    Idea(
        "evaluate/suites/tasks",
        "the family's own verifier",
        'float(score(question.facts["task"], after_thought(text)) >= 1.0)',
        "1.0",
        "evaluate/test_tasks.py::test_thoughts_are_no_answer",
    ),
]
