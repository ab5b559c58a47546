"""Rebuild a tokenizer's files from the metadata of a GGUF file: tokenizer.json, its config, chat template, generation.

A GGUF file holds the vocabulary, the merges (or scores) and the name of the rule that cuts text into words; the rules
themselves live here. An unknown rule is refused: a tokenizer that is nearly right spoils every answer without a sign.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.model.gguf.header import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

Json = dict[str, Any]
BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ONLY: Json = BYTE_LEVEL | {"use_regex": False}
DIGITS: Json = {"type": "Digits", "individual_digits": True}
NFC: Json = {"type": "NFC"}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> list[Json]:
    """The GPT-4 way: contractions, words with the mark before them, runs of digits, punctuation, line ends, spaces."""
    return [
        _split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        BYTES_ONLY,
    ]


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2: Json = {"cut": [BYTE_LEVEL]}
SINGLE_DIGITS: Json = {"cut": [DIGITS, BYTE_LEVEL]}
LLAMA3: Json = {"cut": _words(r"\p{N}{1,3}"), "whole_words": True, "add_bos": True}
QWEN2: Json = {"cut": _words(r"\p{N}"), "normalizer": NFC}
GLM4: Json = {"cut": _words(r"\p{N}{1,3}")}
DEEPSEEK3: Json = {
    "cut": [
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
        ),
        BYTES_ONLY,
    ]
}
TEKKEN: Json = {
    "cut": [
        _split(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        BYTES_ONLY,
    ],
    "whole_words": True,
    "add_bos": True,
}
RULES: dict[str, Json] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "gpt2": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": GLM4,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2 | {"normalizer": None},
    "glm4": GLM4,
    "chatglm-bpe": GLM4,
    "deepseek-v3": DEEPSEEK3,
    "tekken": TEKKEN,
}
COPY_AGAIN = "Copy or download it again."


def _token_id(metadata: Metadata, name: str) -> int | None:
    number = metadata.integer(f"tokenizer.ggml.{name}_token_id", None)
    tokens = metadata.items("tokenizer.ggml.tokens", str, None)
    if number is not None and tokens is not None and number >= len(tokens):
        raise UserError(metadata.path, f"its {name} token is {number} of {len(tokens)}", COPY_AGAIN)
    return number


def special_ids(metadata: Metadata) -> Json:
    """bos_token_id, eos_token_id (a list if a turn can end in several ways) and pad_token_id, None where unknown."""
    ends = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    eos = distinct if len(distinct) > 1 else next(iter(distinct), None)
    return {
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": eos,
        "pad_token_id": _token_id(metadata, "padding"),
    }


def tokenizer_files(metadata: Metadata, vocabulary: int, context: int) -> dict[str, str]:
    """File name -> contents. A file without any tokenizer gives the generation config alone."""
    generation = {key: value for key, value in special_ids(metadata).items() if value is not None}
    files = {"generation_config.json": _dump(generation)}
    has_tokens = "tokenizer.ggml.tokens" in metadata.values
    model = metadata.text("tokenizer.ggml.model", ... if has_tokens else "none")
    if model in ("none", "no_vocab"):
        return files
    if model not in ("gpt2", "llama"):
        raise UserError(metadata.path, f"tokenizer model {model[:60]!r} is not supported", "Known ones: gpt2, llama.")
    vocab = _Vocabulary(metadata, vocabulary)
    parts = _byte_level(vocab) if model == "gpt2" else _sentence_pieces(vocab)
    text = _dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": vocab.added(), **parts})
    try:
        Tokenizer.from_str(text)
    except BaseException as error:  # the library's panics are no Exceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise UserError(metadata.path, f"its tokenizer is corrupt ({str(error)[:120]!r})", COPY_AGAIN) from None
    files["tokenizer.json"] = text
    files["tokenizer_config.json"] = _dump(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": vocab.tokens[number] for name, number in vocab.special.items()},
            **{f"add_{name}_token": wanted for name, wanted in vocab.wraps.items()},
        }
    )
    template = metadata.text("tokenizer.chat_template", None)
    if template is not None:
        files["chat_template.jinja"] = template
    return files


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


class _Vocabulary:
    """The tokens with their kinds, checked against each other and against the embedding's rows."""

    def __init__(self, metadata: Metadata, rows: int) -> None:
        self.metadata = metadata
        self.tokens: list[str] = metadata.items("tokenizer.ggml.tokens", str)
        kinds = metadata.items("tokenizer.ggml.token_type", int, None)
        self.kinds: list[int] = kinds if kinds is not None else [NORMAL] * len(self.tokens)
        if not 0 < len(self.tokens) <= rows or len(self.kinds) != len(self.tokens):
            raise self.wrong(f"{len(self.tokens)} tokens, {len(self.kinds)} token types, {rows} embedding rows")
        # Converters fill rows that have no token with [PAD<row>]; the original tokenizer does not know them.
        real = [
            number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds))
            if not (kind == UNUSED and token == f"[PAD{number}]")
        ]
        self.ids = {self.tokens[number]: number for number in real}
        if len(self.ids) != len(real):
            raise self.wrong("a token appears twice")
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        found = {ours: _token_id(metadata, theirs) for ours, theirs in names.items()}
        self.special = {name: number for name, number in found.items() if number is not None}
        self.wraps = {"bos": False, "eos": False}  # whether a text gets this token at its start or end

    def wrong(self, what: str) -> UserError:
        return UserError(self.metadata.path, f"its tokenizer is corrupt: {what}", COPY_AGAIN)

    def added(self) -> list[Json]:
        """Control tokens are special, user-defined ones are cut out of the text whole as well, but shown."""
        return [
            {
                "id": number,
                "content": self.tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for number, kind in enumerate(self.kinds)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and self.tokens[number]
        ]

    def frame(self, add_bos: bool) -> Json | None:
        """The post-processor that puts the first and last token around a text; `add_bos` if the file does not say."""
        self.wraps = {
            name: name in self.special and self.metadata.flag(f"tokenizer.ggml.add_{name}_token", default)
            for name, default in (("bos", add_bos), ("eos", False))
        }
        used = {name: self.special[name] for name, wanted in self.wraps.items() if wanted}
        if not used:
            return None

        def around(sequence: str, kind: int) -> list[Json]:
            ends = {
                name: [{"SpecialToken": {"id": self.tokens[number], "type_id": kind}}] for name, number in used.items()
            }
            return [*ends.get("bos", []), {"Sequence": {"id": sequence, "type_id": kind}}, *ends.get("eos", [])]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": around("A", 0) + around("B", 1),
            "special_tokens": {
                self.tokens[number]: {"id": self.tokens[number], "ids": [number], "tokens": [self.tokens[number]]}
                for number in used.values()
            },
        }

    def merges(self) -> list[list[str]]:
        merges = self.metadata.items("tokenizer.ggml.merges", str)
        pairs = [[merge[:cut], merge[cut + 1 :]] for merge in merges for cut in [merge.find(" ", 1)]]
        if any(merge.find(" ", 1) < 0 for merge in merges):
            raise self.wrong("a merge is not two tokens")
        return pairs

    def merges_from_scores(self) -> list[list[str]]:
        """SentencePiece keeps no merges: every cut of a piece into two pieces is one, the better scores first."""
        scores = self.metadata.items("tokenizer.ggml.scores", float)
        if len(scores) != len(self.tokens) or not all(map(math.isfinite, scores)):
            raise self.wrong("its scores do not fit its tokens")
        pieces = {
            self.tokens[number]: number
            for number, kind in enumerate(self.kinds)
            if kind in (NORMAL, USER_DEFINED, UNUSED) and len(self.tokens[number]) <= 256
        }
        found = []
        for piece, number in pieces.items():
            cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            found += [
                (-scores[number], number, pieces[left], pieces[right], left, right)
                for left, right in cuts
                if left in pieces and right in pieces
            ]
        return [[left, right] for *_, left, right in sorted(found)]


def _byte_level(vocab: _Vocabulary) -> Json:
    name = vocab.metadata.text("tokenizer.ggml.pre", "default")
    if name not in RULES:
        raise UserError(
            vocab.metadata.path, f"unknown pre-tokenizer {name[:60]!r}", f"Known ones: {', '.join(sorted(RULES))}."
        )
    rule = RULES[name]
    cut = rule["cut"]
    return {
        "normalizer": rule.get("normalizer"),
        "pre_tokenizer": cut[0] if len(cut) == 1 else {"type": "Sequence", "pretokenizers": cut},
        "post_processor": vocab.frame(rule.get("add_bos", False)),
        "decoder": BYTE_LEVEL | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.get("whole_words", False),
            "vocab": vocab.ids,
            "merges": vocab.merges(),
        },
    }


def _sentence_pieces(vocab: _Vocabulary) -> Json:
    prefix = vocab.metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocab.special.get("unk", next((n for n, kind in enumerate(vocab.kinds) if kind == UNKNOWN), None))
    has_merges = "tokenizer.ggml.merges" in vocab.metadata.values
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
        if prefix
        else spaces,
        "pre_tokenizer": None,
        "post_processor": vocab.frame(add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else vocab.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": BYTE in vocab.kinds,
            "ignore_merges": False,
            "vocab": vocab.ids,
            "merges": vocab.merges() if has_merges else vocab.merges_from_scores(),
        },
    }
