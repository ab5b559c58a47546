"""Which prefixes were sent to a replica lately: a prompt is routed to where most of it is in the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MAX_PAGES = 65_536  # of one replica


class PrefixIndex:
    """The prefixes of prompts, page by page; the least recently used are evicted first."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self.max_pages = max_pages
        self.pages: OrderedDict[int, None] = OrderedDict()

    def add(self, namespace: str, prompt: Sequence[int], page_size: int) -> None:
        for page in prefixes(namespace, prompt, page_size):
            self.pages[page] = None
            self.pages.move_to_end(page)
        while len(self.pages) > self.max_pages:
            self.pages.popitem(last=False)

    def tokens(self, namespace: str, prompt: Sequence[int], page_size: int) -> int:
        """The length of a prompt's longest prefix that was sent before."""
        count = 0
        for page in prefixes(namespace, prompt, page_size):
            if page not in self.pages:
                break
            count += page_size
        return count


def prefixes(namespace: str, prompt: Sequence[int], page_size: int) -> Iterator[int]:
    """A hash for every prefix of whole pages, of the namespace and all tokens up to there."""
    digest = hash(namespace)
    for start in range(0, len(prompt) - page_size + 1, page_size):
        digest = hash((digest, *prompt[start : start + page_size]))
        yield digest
