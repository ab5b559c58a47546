"""Texts as vectors of length one, by any model directory: an encoder as sentence-transformers lays it out (MiniLM, E5,
BGE, ModernBERT), or a language model's own hidden states.

embedder = Embedder.open("out/minilm")
embedder.embed(["A text.", "Another one."])     (2, 384) float32
embedder.embed_query("Which text?")             (384,)
Embedder.open("out/minilm", bits=8)             half the time, cosines within 0.005 of those
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.rounded import round_matrices
from moesaic.model.transformer import Model
from moesaic.serve.core.encoding import Encoding, encoded
from moesaic.serve.core.pooling import add_rows, check_modules, normalized, pooled, recommended_pooling

AT_ONCE = 4096  # texts that are tokenized together

Progress = Callable[[int, int], None]


class Embedder:
    """The same text gives the same vector, whatever it is embedded together with."""

    def __init__(self, model: Model, name: str) -> None:
        if model.tokenizer is None:
            raise UserError(name, "has no tokenizer", "Name a directory that holds tokenizer.json.")
        check_modules(model.tokenizer, name)
        self.model, self.name = model, name
        self.pooling = recommended_pooling(model.tokenizer)
        self.encoding = Encoding(model.config, model.tokenizer)

    @classmethod
    def open(
        cls, model_dir: str | Path, *, device: str | None = None, threads: int | None = None, bits: int = 32
    ) -> Embedder:
        """With 8 bits, an encoder's matrices are rounded where that is faster, and the name says so; else they stay."""
        model, name = directory.load(model_dir, device=device, threads=threads), Path(model_dir).resolve().name
        return cls(model, f"{name}, 8 bits" if bits == 8 and round_matrices(model) else name)

    @property
    def dimensions(self) -> int:
        return self.model.config.hidden

    @property
    def max_tokens(self) -> int:
        """Of a text; what is longer is cut there."""
        return self.encoding.settings.max_length

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """Of passages, (n, d) float32; those whose model wants a prompt before them get it."""
        return self._embed(texts, self.encoding.settings.passage_prompt, progress)

    def embed_query(self, text: str) -> np.ndarray:
        found: np.ndarray = self._embed([text], self.encoding.settings.query_prompt)[0]
        return found

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str], prompt: str, progress: Progress | None = None) -> np.ndarray:
        out_ND = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        done = 0
        for first in range(0, len(texts), AT_ONCE):
            tokens = self.encoding.texts(texts[first : first + AT_ONCE], prompt)
            for number, hidden_TD in encoded(self.model, tokens):
                if len(hidden_TD):  # a tokenizer without special tokens makes nothing of nothing
                    found_D = pooled(self.pooling, add_rows(self.pooling, None, hidden_TD), len(hidden_TD))
                    out_ND[first + number] = normalized(found_D).cpu().numpy()
                done += 1
                if progress is not None:
                    progress(done, len(texts))
        return out_ND
