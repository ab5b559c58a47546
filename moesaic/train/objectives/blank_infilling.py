"""GLM's autoregressive blank infilling: spans of the text are cut out and written after it, in random order.

    train: {objective: {name: blank_infilling, share: 0.15, mean_span: 3.0}}          causal, as GLM's later decoders
    train: {objective: {name: blank_infilling, rest: 0.7}}                            with model.infilling, as GLM-130B

Part A is the text with each span replaced by a mask token; part B is, for every span, a start token and the span. The
model learns to write part B. Positions of part B are those of the masks they fill, plus their place in the span, so
that a span's first token stands where its mask stood. Of a model that is made for it (`model.infilling`) part A sees
itself in both directions, and its positions do not tell how long a blank is.

What is cut: short spans ([MASK]), of `rest` of the sequences their end instead, of any length ([gMASK]), of `sentences`
of them whole sentences ([sMASK]). GLM-130B takes rest=0.7.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective

MASKS = ("[MASK]", "[sMASK]", "[gMASK]")  # for some words, a sentence, the rest
START, END = "<sop>", "<eop>"
SENTENCE_ENDS = (".", "!", "?", "\n")


@dataclass(frozen=True)
class BlankInfilling(Objective):
    share: float = 0.15  # of the tokens are cut out
    mean_span: float = 3.0  # Poisson
    rest: float = 0.0  # share of the sequences whose end is cut off
    sentences: float = 0.0  # share of them that lose sentences
    mask: str = MASKS[0]
    sentence_mask: str = MASKS[1]
    rest_mask: str = MASKS[2]
    start: str = START
    end: str = END
    seed: int = 0
    _marks: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sentence_ends: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.mean_span < 1:
            raise ValueError("share must be between 0 and 1, and mean_span at least 1")

        if not 0 <= self.rest + self.sentences <= 1 or min(self.rest, self.sentences) < 0:
            raise ValueError("rest and sentences are shares, of at most 1 together")

    def special_tokens(self) -> dict[str, str]:
        wanted = {"mask": True, "sentence_mask": self.sentences > 0, "rest_mask": self.rest > 0}
        names = (*(name for name, needed in wanted.items() if needed), "start", "end")
        return {name: getattr(self, name) for name in names}

    def prepare(self, model: Model) -> None:
        for name, text in self.special_tokens().items():
            number = model.tokenizer.fast.token_to_id(text) if model.tokenizer else None
            if number is None:
                raise UserError(
                    f"train.objective.{name}", f"the tokenizer has no token {text!r}", "Name one that it has."
                )
            self._marks[name] = number
        if self.sentences and model.tokenizer is not None:
            texts = ((token, model.tokenizer.decode([token])) for token in range(len(model.tokenizer)))
            self._sentence_ends.update(token for token, text in texts if text.rstrip(" ").endswith(SENTENCE_ENDS))

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        both_ways = model.config.infilling is not None
        rows = [self.cut(tokens_T.tolist(), both_ways) for tokens_T in batch.tokens_T.split(batch.lengths)]
        tokens_T, targets_T, positions_T = (
            torch.tensor([value for row in rows for value in row[part]], device=batch.tokens_T.device)
            for part in range(3)
        )
        prefixes = [row[0].index(self._marks["start"]) for row in rows] if both_ways else None
        lengths = [len(row[0]) for row in rows]
        layout = Layout(lengths, positions=positions_T, prefixes=prefixes, device=tokens_T.device)
        hidden_TD = model(tokens_T, layout, routing, runner)
        # A batch of `count` next-token targets has fewer blanks; the mean is over those, and a part weighs its share.
        blanks = (targets_T != IGNORED).sum().clamp(min=1)
        share = (batch.targets_T != IGNORED).sum() / max(batch.count, 1)
        scale_T: Tensor = (share / blanks).float().expand(len(targets_T))
        total, _ = model.cross_entropy(hidden_TD, targets_T, scale_T)
        return Loss(total, {"blanks": total.detach()}, routing)

    def cut(self, tokens: list[int], both_ways: bool = False) -> tuple[list[int], list[int], list[int]]:
        """Tokens, targets and positions of one sequence with its blanks; the same cut for the same tokens."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, tokens)).encode()))
        mask, spans = self._blanks(tokens, generator)
        text: list[int] = []
        positions: list[int] = []
        inside = {place for begin, end in spans for place in range(begin, end)}
        begins = {begin: 0 for begin, _ in spans}  # and the position of the mask that is there
        for place, token in enumerate(tokens):
            if place in inside and place not in begins:
                continue
            position = len(text) if both_ways else place
            if place in begins:
                begins[place] = position
            text.append(mask if place in begins else token)
            positions.append(position)
        targets = [IGNORED] * len(text)
        for number in torch.randperm(len(spans), generator=generator).tolist():
            begin, end = spans[number]
            span = tokens[begin:end]
            text += [self._marks["start"], *span]
            targets += [*span, self._marks["end"]]
            positions += range(begins[begin], begins[begin] + len(span) + 1)
        return text, targets, positions

    def _blanks(self, tokens: list[int], generator: torch.Generator) -> tuple[int, list[tuple[int, int]]]:
        """The mask of a sequence, and the spans it stands for."""
        kind = float(torch.rand((), generator=generator)) if self.rest or self.sentences else 1.0
        if kind < self.rest:
            begin = int(torch.randint(0, len(tokens), (), generator=generator))
            return self._marks["rest_mask"], [(begin, len(tokens))]
        if kind < self.rest + self.sentences:
            return self._marks["sentence_mask"], self._whole_sentences(tokens, generator)
        return self._marks["mask"], self._spans(len(tokens), generator)

    def _whole_sentences(self, tokens: list[int], generator: torch.Generator) -> list[tuple[int, int]]:
        """Some of them, no two neighbours, until `share` of the tokens is reached."""
        ends = [place + 1 for place, token in enumerate(tokens) if token in self._sentence_ends]
        ends = sorted({*ends, len(tokens)})
        sentences = list(zip([0, *ends[:-1]], ends, strict=True))
        chosen: set[int] = set()
        for number in torch.randperm(len(sentences), generator=generator).tolist():
            if sum(sentences[n][1] - sentences[n][0] for n in chosen) >= self.share * len(tokens):
                break
            if not {number - 1, number + 1} & chosen:
                chosen.add(number)
        return sorted(sentences[number] for number in chosen)

    def _spans(self, length: int, generator: torch.Generator) -> list[tuple[int, int]]:
        """Spans that do not touch, about `share` of the tokens together."""
        wanted = max(1, round(self.share * length))
        taken: set[int] = set()
        spans: list[tuple[int, int]] = []
        for _ in range(4 * wanted):  # a crowded text may not have room for more
            if wanted <= 0:
                break
            rate = torch.tensor(self.mean_span - 1)
            size = min(1 + int(torch.poisson(rate, generator=generator)), wanted)
            begin = int(torch.randint(0, max(length - size, 0) + 1, (), generator=generator))
            around = range(begin - 1, begin + size + 1)
            if begin + size > length or taken & set(around):
                continue
            taken |= set(range(begin, begin + size))
            spans.append((begin, begin + size))
            wanted -= size
        return sorted(spans)
