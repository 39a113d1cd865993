"""Who has which page of the cache: counted, and found again by the tokens that stand in it.

Knows tokens and page numbers; holds no keys or values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


class Pages:
    """Pages 0 .. num_pages - 1, each free or of one or more sequences.

    A full page is found again by a digest of its tokens and all before them, also after it became
    free, until it is given to somebody else.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free = dict.fromkeys(range(num_pages))  # in the order in which they are given away
        self._users = [0] * num_pages
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    def digests(self, tokens: Sequence[int], count: int, known: list[bytes]) -> list[bytes]:
        """`known`, and behind it the digests of further full pages of the first `count` tokens."""
        size = self.page_size
        for i in range(len(known), count // size):
            page = array("q", tokens[i * size : (i + 1) * size]).tobytes()
            known.append(hashlib.sha256((known[-1] if known else b"") + page).digest())
        return known

    def found(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of as many of the first digests as there are."""
        pages = []
        for digest in digests:
            if (page := self._page_of.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of them are free."""
        return sum(not self._users[page] for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """One more user of each."""
        for page in pages:
            self._users[page] += 1
            self.free.pop(page, None)

    def new(self) -> int:
        """A free page, that which is free longest; what stood in it is forgotten."""
        page = next(iter(self.free))
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
        self.share([page])
        return page

    def keep(self, page: int, digest: bytes) -> None:
        """The page is full and may be found by its digest, if no other is."""
        if page not in self._digest_of and digest not in self._page_of:
            self._digest_of[page], self._page_of[digest] = digest, page

    def release(self, pages: Sequence[int]) -> None:
        """One user fewer of each; later pages of a sequence are given away before earlier ones."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.free[page] = None
