"""Copies between a rank's KV memory and host pages: which slots, and where they lie.

A share of a host page is one slot of the rank's memory, so both are boxes: per layer one run. The
share of a pipeline stage has the stage's layers alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvadaptor.geometry import PageGeometry, Slots
from kvadaptor.transfer.boxes import Boxes, Copying, make_box_copier


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Shares of host pages and the slots of a rank that hold the same KV, (n,) of either.

    `slots` tile a page of the rank's group, `share` is which of a host page's shares it has, and
    `numbers` are the rank's slots as its kernels number them (`Slots.first_blocks`).
    """

    slots: Slots
    share: int
    numbers: Sequence[int]
    pages: Sequence[int]

    def part(self, first: int, last: int) -> "PageCopies":
        """Return the copies from number `first` to before `last`."""
        numbers, pages = self.numbers[first:last], self.pages[first:last]
        return PageCopies(self.slots, self.share, numbers, pages)


class PageCopier:
    """Copies shares in one direction."""

    def __init__(
        self, address: int, kv: torch.Tensor, geometry: PageGeometry, *, loads: bool
    ) -> None:
        """The pages lie at `address`; `kv` is the rank's memory, (bytes,) int8."""
        self._address, self._kv, self._geometry = address, kv, geometry
        self._loads, self._on_device = loads, kv.device.type == "cuda"
        self._own_pages = kv.numel() // geometry.page_bytes
        # The lowest priority: copies must not keep the kernels of steps waiting.
        self._copier = make_box_copier(kv.device)

    def launch(self, copies: PageCopies, *, waits: bool = True) -> Copying:
        """Copy after the copies before these.

        `waits`: and after all that the caller has launched.
        """
        geometry, pitch = self._geometry, self._geometry.layer_page_bytes
        slots, size = copies.slots, geometry.page_bytes
        row, column = divmod(copies.share, slots.columns)
        run_bytes = pitch // slots.columns
        # A step mostly fills a few blocks: arrays would cost more than they save.
        at = self._kv.data_ptr()
        first = self._address + row * slots.layers * pitch + column * run_bytes
        addresses = [number * run_bytes + at for number in copies.numbers]
        own = Boxes(addresses, pitch, self._own_pages, self._on_device)
        host = Boxes([page * size + first for page in copies.pages], pitch, 1, on_device=False)
        sides = (host, own) if self._loads else (own, host)
        return self._copier.copy(*sides, run_bytes, slots.layers, waits=waits)
