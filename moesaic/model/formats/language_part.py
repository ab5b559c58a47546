"""The language model of a release that has encoders beside it, as if it were a directory of its own."""

from __future__ import annotations

from functools import cached_property
from math import prod

from moesaic.model.families.multimodal import language_model, release_of
from moesaic.model.families.traits import Turned
from moesaic.model.formats.turned import TurnedCheckpoint


class LanguagePart(TurnedCheckpoint):
    """Any directory; of a multimodal one `config`, names and shapes are those of its language model."""

    def _look(self) -> None:
        super()._look()
        where = self.place / "config.json"
        self.release = release_of(self.config, where)
        if self.release is not None:
            self.config = language_model(self.config, where)
            named = {there: self.release.name(there) for there in self._home}
            self._there = {here: there for there, here in named.items() if here is not None}
            self._home = {here: self._home[there] for here, there in self._there.items()}

    @property
    def bytes(self) -> int:
        if self.release is None:
            return super().bytes
        return sum(prod(shape) * self.dtype(name).itemsize for name, shape in self.shapes().items())

    def _stored(self, name: str) -> str:
        return name if self.release is None else self._there[name]

    def _turned(self, name: str) -> Turned:
        endings = () if self.release is None else self.release.inputs_first
        if endings and name.endswith(endings) and self.inputs_first:
            return Turned(inputs_first=True)
        return super()._turned(name)

    @cached_property
    def inputs_first(self) -> bool:
        """Whether experts lie as they were released; `transformers` has turned those that it saved since. One of their
        two matrices may be square, not both."""
        assert self.release is not None
        hidden = self.config.get("hidden_size")
        for place, ending in zip((1, 2), self.release.inputs_first, strict=True):
            shapes = [
                self._home[here].tensors[there].shape for here, there in self._there.items() if here.endswith(ending)
            ]
            if any(len(shape) != 3 or shape[place] != hidden for shape in shapes):
                return False
        return True
