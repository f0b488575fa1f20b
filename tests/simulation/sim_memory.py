"""What lies in the pages of one rank, so that KV which is not there is found out.

A block is marked with its task, its place in the task and how many tokens it covers. A page that is
cut into other slots than before has lost what it held.
"""

BLOCK_TOKENS = 4

Mark = tuple[str, int, int]
"""Task, number of the block in the task, tokens in the block."""

Places = tuple[tuple[int, Mark], ...]
"""Logical blocks of a group and what is to be written to, or found in, each."""

SPOILED: Mark = ("nothing of worth", -1, 0)


class Memory:
    """The KV buffer of one process."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int, dict[int, Mark]]] = {}

    def write(self, page: int, slots: int, slot: int, mark: Mark) -> None:
        width, content = self._pages.get(page, (slots, {}))
        if width != slots:
            content = {}
        content[slot] = mark
        self._pages[page] = (slots, content)

    def read(self, page: int, slots: int, slot: int) -> Mark | None:
        width, content = self._pages.get(page, (slots, {}))
        return content.get(slot) if width == slots else None


def marks(task: str, blocks: list[int], computed: int, first: int = 0) -> Places:
    """The marks of a task whose first `computed` tokens have KV, from token `first` on."""
    return tuple(
        (blocks[number], (task, number, min(BLOCK_TOKENS, computed - number * BLOCK_TOKENS)))
        for number in range(first // BLOCK_TOKENS, -(-computed // BLOCK_TOKENS))
    )
