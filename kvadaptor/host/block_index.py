"""Which pages have which block, as one process knows it."""


class BlockIndex:
    """Pages by the hash of their block, and the other way round."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        """Further pages of a block, where several ranks have stored it."""
        self._hashes: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        """Return whether a page is known to have a block."""
        return page in self._hashes

    def pages(self, key: bytes) -> tuple[int, ...]:
        """Return the pages that have this block or are to have it."""
        page = self._pages.get(key)
        return () if page is None else (page, *self._copies.get(key, ()))

    def enter(self, page: int, key: bytes | None) -> None:
        """Note which block a page has now."""
        before = self._hashes.get(page)
        if before == key:
            return
        if before is not None:
            del self._hashes[page]
            self._forget(before, page)
        if key is not None:
            self._hashes[page] = key
            if self._pages.setdefault(key, page) != page:
                self._copies.setdefault(key, []).append(page)

    def _forget(self, key: bytes, page: int) -> None:
        copies = self._copies.get(key, [])
        if self._pages[key] != page:
            copies.remove(page)
        elif copies:
            self._pages[key] = copies.pop(0)
        else:
            del self._pages[key]
        if not copies:
            self._copies.pop(key, None)
