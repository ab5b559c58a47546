"""Fill in the middle (FIM): a prefix and a suffix as a model was trained on them, between its own special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix and before the middle, as model families name them.
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
)
SUFFIX_FIRST = frozenset({"[PREFIX]"})
REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<reponame>", "<repo_name>")
FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
# They end what was filled in, beside the model's stop tokens.
ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "<EOT>", "▁<EOT>", "[EOT]")


@dataclass(frozen=True)
class ExtraFile:
    """Another file of the repository, as context."""

    text: str
    name: str = "tmp"


@dataclass(frozen=True)
class Infill:
    """The special tokens of one model. What it opens files and repositories with may be missing."""

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repository: int | None
    file: int | None
    ends: frozenset[int]

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        *,
        extra: Sequence[ExtraFile] = (),
        most: int | None = None,
    ) -> list[int]:
        """`extra` files stand before the one that is filled in. Of what is longer than `most` tokens, those next to
        the gap are kept: of the prefix thrice as many as of the suffix, and extra files where there is room left."""
        begin, files = self._begin(), self._files(extra)
        if most is not None:
            room = max(0, most - len(begin) - 3)
            after = min(len(suffix), max(room // 4, room - len(prefix)))
            suffix = suffix[:after]
            prefix = prefix[max(0, len(prefix) - (room - after)) :]
            left = room - after - len(prefix)
            files = files[len(files) - left :] if len(files) > left else files
        before, following = [self.prefix, *prefix], [self.suffix, *suffix]
        halves = [*following, *before] if self.suffix_first else [*before, *following]
        return [*begin, *files, *halves, *([self.middle] if self.middle is not None else ())]

    def _begin(self) -> list[int]:
        """What the tokenizer puts before every text."""
        plain = self.tokenizer.encode("a", special=False)
        whole = self.tokenizer.encode("a")
        start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:start]

    def _files(self, extra: Sequence[ExtraFile]) -> list[int]:
        if not extra:
            return []
        encode = self.tokenizer.encode
        if self.file is None:
            return [token for one in extra for token in encode(f"\n\n--- {one.name} ---\n\n{one.text}", special=False)]
        found = [self.repository, *encode("repository\n", special=False)] if self.repository is not None else []
        for one in extra:
            found += [self.file, *encode(f"{one.name}\n{one.text}", special=False)]
        return [*found, self.file, *encode("file\n", special=False)]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """None for a model that was not trained to fill in."""
    number = tokenizer.fast.token_to_id
    for names in NAMES:
        prefix, suffix, middle = (number(name) for name in names)
        first = names[0] in SUFFIX_FIRST  # and then the prefix itself opens the middle
        if prefix is not None and suffix is not None and (middle is not None or first):
            repository, file = (
                next((n for name in some if (n := number(name)) is not None), None) for some in (REPOSITORY, FILE)
            )
            ends = {n for name in (*ENDS, *REPOSITORY, *FILE) if (n := number(name)) is not None}
            middle = None if first else middle
            own = {token for token in (prefix, suffix, middle) if token is not None}
            return Infill(tokenizer, prefix, suffix, middle, first, repository, file, frozenset(ends | own))
    return None


def need_infill(tokenizer: Tokenizer, field: str) -> Infill:
    found = infill_of(tokenizer)
    if found is None:
        problem = "this model has no special tokens to fill in the middle with"
        raise UserError(field, problem, "Leave it out, or serve a model that was trained to fill in.")
    return found
