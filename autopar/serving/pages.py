"""`PagePool`: which pages of one window kind are free, and which one a request gets next.

Page 0 is scratch. The others form regions of ``width`` pages, enough for the longest request: a request starts in a
wholly free region, at the offset of its position, and goes on with the successor of its last page. So the keys of a
request are contiguous, and those of requests that decode together lie at equal distances. Where no region is free, a
request gets pages of the fullest one.

A freed page keeps its content until it is given out again; regions, and pages within them, are given out again in the
order in which they were freed. `PrefixTree` knows the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def most_pages(windows: Sequence[int], page_size: int, max_length: int, step_tokens: int) -> tuple[int, ...]:
    """How many pages of each window kind a request of ``max_length`` tokens holds at once: pages behind a window are
    given back; a part of a page is at either end of it."""
    longest = -(-max_length // page_size)
    return tuple(
        min(longest, -(-(window - 1 + step_tokens) // page_size) + 1) if window else longest for window in windows
    )


class PagePool:
    """The pages of one window kind, on one replica.

    pages: number of pages, page 0 among them. width: pages of a region. reused: called with each page that has been
    given out to be overwritten.
    """

    def __init__(self, pages: int, width: int, reused: Callable[[int], None] = lambda page: None) -> None:
        assert pages > 0 and width > 0
        self.pages, self.width = pages, width
        self.free = pages - 1
        self._reused = reused
        self._references = [1] + [0] * (pages - 1)
        regions = -(-(pages - 1) // width)
        self._of_region = [
            dict.fromkeys(self._pages_of(region)) for region in range(regions)
        ]  # free ones, oldest first
        # Regions by their number of free pages, those that have had it longest first; the last may be shorter.
        self._with_free: list[dict[int, None]] = [{} for _ in range(width + 1)]
        for region, free in enumerate(self._of_region):
            self._with_free[len(free)][region] = None

    def _pages_of(self, region: int) -> range:
        first = 1 + region * self.width
        return range(first, min(first + self.width, self.pages))

    def references(self, page: int) -> int:
        """The number of requests that hold a page."""
        return self._references[page]

    def allocate(self, index: int, previous: int = 0) -> int:
        """A page to be overwritten, for the tokens of page ``index`` of a request whose page before is ``previous``; 0:
        it has none of its own. Returns 0 if all pages are used."""
        page = self._successor(previous) if previous else self._in_free_region(index)
        if not page or self._references[page]:
            page = self._in_fullest_region()
        if page:
            self.hold(page)
            self._reused(page)
        return page

    def _successor(self, page: int) -> int:
        """The next page of the region; after its last one the first: a windowed request goes in a circle."""
        region = self._pages_of((page - 1) // self.width)
        return page + 1 if page + 1 in region else region.start

    def _in_free_region(self, index: int) -> int:
        region = next(iter(self._with_free[self.width]), None)
        return 0 if region is None else 1 + region * self.width + index % self.width

    def _in_fullest_region(self) -> int:
        if not self.free:
            return 0
        region = next(iter(next(regions for regions in self._with_free[1:] if regions)))
        return next(iter(self._of_region[region]))

    def hold(self, page: int) -> None:
        """Count one more reference to a page, used or free, with its content."""
        assert 0 < page < self.pages
        if not self._references[page]:
            region, free = self._moved(page)
            del free[page]
            self._with_free[len(free)][region] = None
            self.free -= 1
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one reference less to each page; those without any are free. Entries of 0 are skipped."""
        for page in pages:
            if page:
                assert self._references[page] > 0, f"page {page} is free"
                self._references[page] -= 1
                if not self._references[page]:
                    region, free = self._moved(page)
                    free[page] = None
                    self._with_free[len(free)][region] = None
                    self.free += 1

    def _moved(self, page: int) -> tuple[int, dict[int, None]]:
        """A page's region, taken off the lists by number of free pages, and its free pages."""
        region = (page - 1) // self.width
        free = self._of_region[region]
        del self._with_free[len(free)][region]
        return region, free
