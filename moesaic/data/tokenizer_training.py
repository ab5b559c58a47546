"""Train a tokenizer (byte-level BPE), or load an existing one.

    tokenizer = train_tokenizer(texts, vocabulary=4096)      # moesaic.model.tokenizer.Tokenizer
    tokenizer = load_tokenizer("out/smollm2")                # a model directory, or a tokenizer.json
    save_tokenizer(tokenizer, directory)

The same texts give the same tokenizer, to the byte: BPE counts are sums, and ties go to the lower pair of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

END = "<|endoftext|>"

# The first numbers of every tokenizer made here. Text never becomes one of them: they are only put in by their numbers
# or by the chat template.
SPECIAL = (
    END,  # ends a document, and an answer
    "<|pad|>",  # never in a batch of ours; other libraries ask for one
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",  # what a tool answered
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[MASK]",  # a blank of GLM's autoregressive infilling: short, whole sentence, rest of the text
    "[sMASK]",
    "[gMASK]",
    "<sop>",  # begins and ends what fills a blank
    "<eop>",
    "<|fork|>",  # an answer divides into branches that are written in parallel (APAR); a branch begins
    "<|child|>",
)
BYTES = 256
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")

# Words with the space before them, digits one by one (so that numbers have one reading), runs of signs, and white
# space, of which the last space stays with the word that follows.
PIECES = r" ?\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int, pieces: str = PIECES) -> Tokenizer:
    """Byte-level BPE of at most `vocabulary` tokens (fewer if the texts hold too few different words). No token reaches
    over the border of two `pieces`, matches of a regular expression."""
    least = BYTES + len(SPECIAL)
    if vocabulary < least:
        raise UserError(
            "model.vocab",
            f"{vocabulary} is too small for a tokenizer: {BYTES} bytes and {len(SPECIAL)} special tokens have to fit",
            f"Use at least {least}, or give an existing one in data.tokenizer.",
        )
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=32,  # no token for a line of dashes
    )
    fast.train_from_iterator(texts, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    template = resources.files("moesaic.data").joinpath("chat_template.jinja").read_bytes()
    files = {
        "tokenizer.json": fast.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        "chat_template.jinja": template,
    }
    return Tokenizer(fast, files, Path("tokenizer"))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, or the one in a tokenizer.json (with the files beside it)."""
    place = Path(path).expanduser()
    remedy = "Give a model directory or a tokenizer.json in data.tokenizer."
    if not place.exists():
        raise UserError(place, "no such file or directory", remedy)
    folder = place if place.is_dir() else place.parent
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if place.is_file():
        files["tokenizer.json"] = place.read_bytes()
    tokenizer = Tokenizer.from_files(files, folder)
    if tokenizer is None:
        raise UserError(place, "has no tokenizer.json", remedy)
    end_of_document(tokenizer)
    return tokenizer


def end_of_document(tokenizer: Tokenizer) -> int:
    """The number of the token that ends a document."""
    # A chat model's eos_token often ends a turn; what it was pretrained with is this one where it has it.
    for token in (END, tokenizer.special("eos_token")):
        if token is not None and (number := tokenizer.fast.token_to_id(token)) is not None:
            return int(number)
    raise UserError(
        tokenizer.place,
        "the tokenizer has no token that ends a document",
        f"Give it an eos_token in tokenizer_config.json, or a token {END}.",
    )


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    for name in FILES:
        if name in tokenizer.files:
            (directory / name).write_bytes(tokenizer.files[name])
