"""`PagedCache`: the pages of all window kinds on one replica, and which prefixes of requests they hold.

A prefix is shared by whole pages. `Node` is one page's tokens after a known prefix; the nodes form a tree, found by
(parent, tokens), so that equal tokens alone are equal prefixes. A node has a page of each window kind, or 0 where that
was overwritten; without its page of kind 0, which is unlimited, nobody can use it. A prefix is usable if, for each
kind, the pages that later tokens see are there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.serving.pages import PagePool, most_pages
from autopar.serving.requests import Request


@dataclass(slots=True, eq=False)
class Node:
    """One page's tokens after a known prefix."""

    serial: int
    key: tuple[int, tuple[int, ...]]  # (serial of the parent, tokens)
    pages: list[int]  # per window kind; 0: overwritten


class PagedCache:
    """The page pools of a replica.

    pages, windows: per window kind, as of `Runner`. page_size, max_length, step_tokens: in tokens. page_bytes: of one
    page, per kind, for the error. Raises ValueError if one request of ``max_length`` does not fit.
    """

    def __init__(
        self,
        pages: Sequence[int],
        windows: Sequence[int],
        page_size: int,
        max_length: int,
        step_tokens: int,
        page_bytes: Sequence[int] | None = None,
    ) -> None:
        assert windows and windows[0] == 0, "kind 0 is unlimited"
        self.page_size, self.windows = page_size, tuple(windows)
        self.most = most_pages(windows, page_size, max_length, step_tokens)
        self._check(pages, max_length, page_bytes or [0] * len(windows))
        self.pools = [
            PagePool(count, width, functools.partial(self._overwritten, kind))
            for kind, (count, width) in enumerate(zip(pages, self.most))
        ]
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self._owner: list[dict[int, Node]] = [{} for _ in windows]  # page -> node, per kind
        self._serial = self._root = 0

    def _check(self, pages: Sequence[int], max_length: int, page_bytes: Sequence[int]) -> None:
        for kind, (count, most) in enumerate(zip(pages, self.most)):
            if count - 1 < most:
                window = f" behind a window of {self.windows[kind]}" if self.windows[kind] else ""
                size = sum(n * size for n, size in zip(pages, page_bytes))
                needed = sum(max(n, m + 1) * size for n, m, size in zip(pages, self.most, page_bytes))
                way = f"raise cache to {needed / 1e6:.1f} MB" if size else "raise cache"
                raise ValueError(
                    f"serve: cache{f' of {size / 1e6:.1f} MB' if size else ''} holds {max(count - 1, 0)} pages of "
                    f"{self.page_size} tokens, one request of max_length {max_length} needs {most}{window}; {way}, or "
                    "lower max_length"
                )

    # --- prefixes -------------------------------------------------------------------------------------------------

    def known_prefix(self, tokens: Sequence[int]) -> list[Node]:
        """The pages of the longest usable prefix, never with the last token: something must be computed."""
        size, found = self.page_size, list[Node]()
        missing = [-1] * len(self.windows)  # per kind: the last page that is not there
        parent, usable = self._root, 0
        for index in range((len(tokens) - 1) // size):
            node = self._nodes.get((parent, tuple(tokens[index * size : (index + 1) * size])))
            if node is None:
                break
            found.append(node)
            parent = node.serial
            for kind, page in enumerate(node.pages):
                if not page:
                    missing[kind] = index
            if all(missing[kind] < self._first_seen(kind, (index + 1) * size) for kind in range(len(missing))):
                usable = index + 1
        return found[:usable]

    def _first_seen(self, kind: int, position: int) -> int:
        """The first page that a token at a position sees."""
        window = self.windows[kind]
        return max(0, position - window + 1) // self.page_size if window else 0

    def _overwritten(self, kind: int, page: int) -> None:
        node = self._owner[kind].pop(page, None)
        if node is not None:
            node.pages[kind] = 0
            if kind == 0:
                del self._nodes[node.key]

    def remember(self, request: Request) -> None:
        """The pages of a request that are wholly computed once the steps planned so far have run: from now on others
        find them."""
        size = self.page_size
        while (request.remembered + 1) * size <= request.computed:
            index = request.remembered
            key = (request.prefix, tuple(request.tokens[index * size : (index + 1) * size]))
            node = self._nodes.get(key)
            if node is None:
                self._serial += 1
                node = self._nodes[key] = Node(self._serial, key, [0] * len(self.windows))
            for kind, pages in enumerate(request.pages):
                if not node.pages[kind] and pages[index]:
                    node.pages[kind] = pages[index]
                    self._owner[kind][pages[index]] = node
            request.prefix, request.remembered = node.serial, index + 1

    def forget(self) -> None:
        """Weights have changed: no prefix is known any more, nor will those be that running requests began."""
        self._serial += 1
        self._root = self._serial
        self._nodes.clear()
        for owner in self._owner:
            owner.clear()

    # --- the pages of a request -----------------------------------------------------------------------------------

    def admit(self, request: Request, nodes: list[Node], margin: int) -> bool:
        """Give a request its known prefix and pages for all other tokens, if ``margin`` pages of each kind stay free.
        Behind a window a request gets its pages step by step."""
        count = -(-len(request.tokens) // self.page_size)
        held = [self._shared(kind, nodes) for kind in range(len(self.windows))]
        for kind, pool in enumerate(self.pools):
            in_use = sum(1 for page in held[kind] if page and pool.references(page))
            if min(count, self.most[kind]) - in_use + margin > pool.free:
                return False
        for pool, pages in zip(self.pools, held):
            for page in pages:
                if page:
                    pool.hold(page)
        request.pages = held
        request.shared = request.remembered = len(nodes)
        request.prefix = nodes[-1].serial if nodes else self._root
        request.computed = len(nodes) * self.page_size
        grown = self._grow(request, 0, count)
        assert grown, "pages were counted"
        self._written(request)
        return True

    def _shared(self, kind: int, nodes: list[Node]) -> list[int]:
        first = self._first_seen(kind, len(nodes) * self.page_size)
        return [0 if index < first else node.pages[kind] for index, node in enumerate(nodes)]

    def extend(self, request: Request, start: int, end: int) -> bool:
        """Pages for a request's tokens at ``start`` to ``end``; those that no token from ``start`` on sees are given
        back. False if there are not enough free ones; it keeps what it got."""
        count = -(-end // self.page_size)
        for kind, pages in enumerate(request.pages):
            for index in range(self._first_seen(kind, start) - 1, -1, -1):
                if not pages[index]:
                    break
                self.pools[kind].release([pages[index]])
                pages[index] = 0
        enough = all(self._grow(request, kind, count) for kind in range(len(self.pools)))
        self._written(request)
        return enough

    def _written(self, request: Request) -> None:
        request.tables = tuple(map(tuple, request.pages))
        request.room = min(map(len, request.pages)) * self.page_size

    def _grow(self, request: Request, kind: int, count: int) -> bool:
        pages = request.pages[kind]
        while len(pages) < count:
            page = self.pools[kind].allocate(len(pages), pages[-1] if len(pages) > request.shared else 0)
            if not page:
                return False
            pages.append(page)
        return True

    def free(self, request: Request) -> None:
        """Take all pages of a request; the last ones are overwritten first."""
        for pool, pages in zip(self.pools, request.pages):
            pool.release(reversed(pages))
        request.pages, request.tables = [], ()
        request.computed = request.room = request.shared = request.remembered = 0
