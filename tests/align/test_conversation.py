"""What the assistant said is what is learned, and nothing else."""

from __future__ import annotations

import json
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from moesaic.align.conversation import read_conversation
from moesaic.align.examples import FileExamples, Mixture, TaskExamples, open_conversations, open_examples
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import PAIRS, sources
from moesaic.data.packing import IGNORED
from moesaic.data.tokenizer_training import train_tokenizer
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.worlds.completions import prompt_tokens

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5 – née."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Gladly"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([json.dumps(TALK)] * 3, 330)


def test_only_the_assistants_words_and_end_marks_are_learned(tokenizer):
    (said,) = read_conversation(tokenizer, TALK)
    assert tokenizer.decode(said.tokens, special=True) == tokenizer.chat(TALK, reply=False)
    runs, last = [], False
    for token, learn in zip(said.tokens, said.learn, strict=True):
        if learn and not last:
            runs.append([])
        if learn:
            runs[-1].append(token)
        last = learn
    spoken = [tokenizer.decode(run, special=True) for run in runs]
    assert spoken == [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|endoftext|>',
        "It is 5 – née.<|endoftext|>",
        "Gladly<|endoftext|>",
    ]


def test_each_answer_is_behind_what_the_engine_would_be_asked(tokenizer):
    (said,) = read_conversation(tokenizer, TALK)
    for number, message in enumerate(TALK):
        if message["role"] == "assistant":
            prompt = prompt_tokens(tokenizer, TALK[:number])
            assert said.tokens[: len(prompt)] == prompt
            assert not said.learn[len(prompt) - 1] and said.learn[len(prompt)]


def test_a_template_that_forgets_gives_one_sequence_for_each_answer(tokenizer):
    # As some models' templates do, thoughts are shown for the last answer only.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:"
        "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}."
        "{% else %}U:{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    files = tokenizer.files | {"chat_template.jinja": template.encode()}
    other = Tokenizer(tokenizer.fast, files, tokenizer.place)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    first, second = read_conversation(other, talk)
    assert [other.decode([t for t, learn in zip(s.tokens, s.learn) if learn]) for s in (first, second)] == [
        "(hm)b.",
        "(so)d.",
    ]
    assert other.decode(second.tokens) == "U:a;A:b.U:c;A:(so)d."


def test_a_conversation_without_an_answer_is_refused(tokenizer):
    with pytest.raises(UserError, match="nothing that an assistant said"):
        read_conversation(tokenizer, TALK[:2])


def test_batches_hold_whole_conversations_and_go_on_from_any_position(tokenizer, tmp_path):
    file = tmp_path / "talks.jsonl"
    lines = [{"prompt": f"number {n}", "response": f"it is {n}"} for n in range(10)]
    file.write_text("\n".join(map(json.dumps, lines)))
    data = [{"path": str(file), "weight": 2}, {"path": "builtin:gcd"}]

    def stream() -> ConversationStream:
        return ConversationStream(tokenizer, open_examples(data, "train", 3), batch_tokens=150, max_length=400)

    whole = stream()
    batches = [next(whole) for _ in range(5)]
    for batch in batches:
        assert sum(batch.lengths) == len(batch.tokens_T) >= 150
        assert batch.count == int((batch.targets_T != IGNORED).sum()) > 0
        start = 0
        for length in batch.lengths:  # a target is always the next token of the same conversation
            targets, tokens = batch.targets_T[start : start + length], batch.tokens_T[start : start + length]
            assert targets[-1] == IGNORED
            kept = targets[:-1] != IGNORED
            assert (targets[:-1][kept] == tokens[1:][kept]).all()
            start += length
    for number in range(4):
        resumed = stream().from_position(batches[number].position_after)
        assert (next(resumed).tokens_T == batches[number + 1].tokens_T).all()


def test_other_processes_read_the_same_conversations_in_the_same_order(tokenizer):
    def stream(readers: int) -> ConversationStream:
        examples = open_examples([{"path": "builtin:gcd"}, {"path": "builtin:lcm"}], "train", 0)
        return ConversationStream(tokenizer, examples, batch_tokens=1500, max_length=400, readers=readers)

    here, there = stream(0), stream(2)
    state = torch.get_rng_state()
    for _ in range(8):
        mine, theirs = next(here), next(there)
        assert torch.equal(mine.tokens_T, theirs.tokens_T) and torch.equal(mine.targets_T, theirs.targets_T)
        assert mine.position_after == theirs.position_after and mine.lengths == theirs.lengths
    assert torch.equal(torch.get_rng_state(), state)
    resumed = there.from_position(theirs.position_after)
    assert torch.equal(next(resumed).tokens_T, next(here).tokens_T)
    assert len(active_children()) == 4
    there.close(), resumed.close()
    assert not active_children()


@pytest.mark.parametrize("readers", [0, 1])
def test_what_is_wrong_with_a_conversation_is_told_wherever_it_is_read(tokenizer, tmp_path, readers):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    stream = ConversationStream(tokenizer, open_examples([{"path": str(file)}], "train", 0), 100, 100, readers)
    with pytest.raises(UserError, match="talks.jsonl:1: hold nothing that an assistant said. Add a message of role"):
        next(stream)
    stream.close()


def test_a_template_that_writes_nothing_is_an_error_and_no_endless_search(tokenizer):
    silent = Tokenizer.from_files(tokenizer.files | {"chat_template.jinja": b""}, Path("silent"))
    with pytest.raises(UserError, match="no conversation has between 1 and 100 tokens"):
        next(ConversationStream(silent, open_examples([{"path": "builtin:gcd"}], "train", 0), 100, 100))


def test_sources_take_turns_by_weight_and_repeat_in_another_order(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"question": str(n), "answer": n}) for n in range(6)))
    source = FileExamples(file, seed=1)
    epochs = [[source[e * 6 + n].question for n in range(6)] for e in range(3)]
    assert all(sorted(epoch) == [str(n) for n in range(6)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert source[0].answer == source[0].question
    mixture = Mixture([source, TaskExamples("gcd", "train")], [3, 1])
    for _ in range(40):
        next(mixture)
    assert mixture.taken == [30, 10]


def test_sources_take_the_same_turns_from_any_position():
    weights = [0.2, 1, 5, 0.5, 0.3]  # divided by their sum twice, two of them are tied no more
    going = Mixture([range(1000)] * 5, weights)
    for _ in range(60):
        resumed = Mixture([range(1000)] * 5, weights).at(going.taken)
        assert resumed.turn() == going.turn()


def test_a_source_may_begin_later_and_with_another_seed_elsewhere():
    whole, later = (open_examples([{"path": "builtin:gcd,lcm", **extra}], "train", 0) for extra in ({}, {"skip": 5}))
    questions = [next(whole).question for _ in range(8)]
    assert [next(later).question for _ in range(3)] == questions[5:]
    other = open_examples([{"path": "builtin:gcd,lcm"}], "train", 1)
    assert not {next(other).question for _ in range(8)} & set(questions)
    for skip in (-1, 1.5, True, "5"):
        with pytest.raises(ValueError, match="what to skip"):
            sources(({"path": "builtin:gcd", "skip": skip},))
    with pytest.raises(ValueError, match="every source"):
        sources(({"path": "pairs.jsonl", "skip": 5},), PAIRS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", ":1: is not JSON"),
        ('{"question": "a"}\n[1]', ":2: is not a JSON object"),
        ('{"messages": [1]}', "list of"),
        ('{"answer": "a"}', "neither messages nor"),
        ('{"question": "a"}\n\n{"messages": []}', ":3: messages is empty"),
        ('{"question": "a", "tools": {}}', ":1: tools is not a list"),
        ('{"question": "a"}\n{"question": "\\ud83d"}', ":2: is not Unicode"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        FileExamples(file, 0)
    with pytest.raises(UserError, match="cannot be read"):
        FileExamples(tmp_path / "none.jsonl", 0)


def test_lines_end_where_json_lines_do(tmp_path):
    """Not at every mark that Unicode has for the end of a line, which a text may hold; a byte order mark is none."""
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"question": "one\u2028two\x85", "answer": "\\ud83d\\ude00"}\r\n', encoding="utf-8")
    (example,) = FileExamples(file, 0).items
    assert (example.question, example.answer, example.place) == ("one\u2028two\x85", "\U0001f600", f"{file}:1")


def test_conversations_without_an_answer_are_found_when_the_file_is_opened(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n{"messages": [{"role": "user", "content": "hello"}]}')
    with pytest.raises(UserError, match="a.jsonl:2: holds nothing that an assistant said"):
        open_conversations([{"path": str(file), "skip": 1}], 0)
