"""Which prefixes a replica has read lately: enough to send a prompt where most of it is in the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MOST = 65_536  # pages remembered of one replica


class PrefixIndex:
    """The prefixes of prompts, page by page, least recently sent forgotten first."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.pages: OrderedDict[int, None] = OrderedDict()

    def add(self, salt: str, prompt: Sequence[int], size: int) -> None:
        for page in prefixes(salt, prompt, size):
            self.pages[page] = None
            self.pages.move_to_end(page)
        while len(self.pages) > self.most:
            self.pages.popitem(last=False)

    def tokens(self, salt: str, prompt: Sequence[int], size: int) -> int:
        """How many first tokens of a prompt were sent before."""
        count = 0
        for page in prefixes(salt, prompt, size):
            if page not in self.pages:
                break
            count += size
        return count


def prefixes(salt: str, prompt: Sequence[int], size: int) -> Iterator[int]:
    """A number for every prefix of whole pages; it stands for the salt and all tokens up to there."""
    known = hash(salt)
    for start in range(0, len(prompt) - size + 1, size):
        known = hash((known, *prompt[start : start + size]))
        yield known
