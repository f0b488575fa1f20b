"""What a cell holds and what it can serve, before it starts: weights, KV tokens, longest requests.

A rank's weights and KV memory follow from how the cell starts, and no switch changes them: layouts
differ in how many tokens of KV a group has together. So there is one `CellPlan` for each way to
hold the weights, with a `LayoutPlan` for each layout. Pure. Sizes are in bytes, lengths in tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from comm_pool.layout import Layout, Mode, format_layout, parse_layout
from comm_pool.mixed import Mixed
from coordinator.protocol.held_weights import Borrow, HeldBytes, held_bytes
from coordinator.protocol.model_size import ModelSize
from coordinator.sizing.device_memory import OtherMemory, other_memory
from coordinator.sizing.model_facts import Device, ModelFacts
from kvadaptor.geometry import GeometryError

TOO_MUCH_KV = "The KV memory of --kv-cache-memory-bytes exceeds what the weights leave."
NOTHING = OtherMemory(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Division:
    """How the ranks of a cell hold the weights, and the groups that they prepare."""

    ranks: int
    widths: tuple[int, ...]
    """Ascending, from 1 on."""
    parts: int = 1
    borrow: Borrow = "ffn"
    whole_layers: int = 0
    mixed: tuple[Mixed, ...] = ()
    alone: bool = False
    """Ranks form no groups, although the model's sizes allow them."""

    @property
    def name(self) -> str:
        """What to type for it."""
        if self.parts == 1:
            return "all weights, --widths 1" if self.alone else "all weights"
        whole = f" --whole-layers {self.whole_layers}" if self.whole_layers else ""
        return f"--weight-parts {self.parts} --borrow {self.borrow}{whole}"

    @property
    def served_widths(self) -> tuple[int, ...]:
        """The widths of groups that serve: ranks with parts serve alone and in the widest."""
        if self.parts == 1:
            return self.widths
        return self.widths[-1:] if self.borrow == "none" else (1, self.widths[-1])

    def layouts(self) -> Iterator[Layout]:
        """Yield layouts of one kind of group, then those of one wide group beside lone ranks."""
        names = []
        for width in self.served_widths:
            if width == 1:
                names.append(f"dp{self.ranks}")
                continue
            modes = [str(Mode.TP)]
            if self.parts == 1 or self.borrow != "none":
                modes += [str(Mode.SP), str(Mode.SHIFT)]
            tokens = [f"{mode}{width}" for mode in modes]
            for mixed in self.mixed:
                if mixed.width == width and mixed.tp % self.parts == 0:
                    tokens += [f"{mode}{mixed.sp}tp{mixed.tp}" for mode in (Mode.SP, Mode.SHIFT)]
            names += ["+".join([token] * (self.ranks // width)) for token in tokens]
        if 1 in self.served_widths:
            names += [
                f"tp{width}+dp{self.ranks - width}"
                for width in self.served_widths
                if 1 < width < self.ranks
            ]
        for name in names:
            yield parse_layout(name, self.ranks, self.widths)


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The KV of one layout."""

    layout: str
    group_tokens: tuple[int, ...]
    """KV tokens of each group."""
    longest_request: int
    """Tokens of the longest request, prompt and answer; 0 if the cell does not start."""

    @property
    def cell_tokens(self) -> int:
        """KV tokens of all groups."""
        return sum(self.group_tokens)


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The memory of each rank of a cell, and its layouts."""

    division: Division
    held: HeldBytes
    other: OtherMemory
    room_bytes: int
    kv_bytes: int
    """Memory for KV: what the rest leaves; 0 if the weights do not fit."""
    pages: int
    """With page 0, which holds no tokens."""
    rank_tokens: int
    """KV tokens of a rank that is alone."""
    layouts: tuple[LayoutPlan, ...]
    reason: str = ""
    """Why the cell does not start; one sentence without a remedy."""
    advice: str = ""
    """What to change then; empty if the reason says it."""

    @property
    def fits(self) -> bool:
        """Whether it starts."""
        return not self.reason

    @property
    def asks_too_much_kv(self) -> bool:
        """Whether it does not start because of the KV memory that the user names."""
        return self.reason == TOO_MUCH_KV


def plan_cell(facts: ModelFacts, device: Device, division: Division, refused: str = "") -> CellPlan:
    """Return the plan of a cell; `refused` is why its model cannot be served so, if it cannot."""
    held = held_bytes(
        facts.size, facts.element, division.parts, division.borrow, division.whole_layers
    )
    other = NOTHING
    if device.kind == "cuda":
        other = other_memory(
            facts.size,
            facts.limits,
            division.served_widths,
            mixed=len(division.mixed),
            parts=division.parts,
            borrow=division.borrow,
            experts_per_token=facts.experts_per_token,
            eager=facts.eager,
        )
    ranks = division.ranks if device.kind == "cpu" else 1
    rest = device.room_bytes // ranks - held.total - other.total
    kv_bytes = max(0, rest if device.kv_bytes is None else device.kv_bytes)
    geometry = facts.geometry
    pages = geometry.num_pages(kv_bytes) if rest >= 0 else 0
    reason = refused or _reason(facts, division, rest, kv_bytes, pages)
    own = 0 if reason else max(0, pages - 1)
    layouts = [_layout_plan(each, facts, own) for each in division.layouts()]
    return CellPlan(
        division=division,
        held=held,
        other=other,
        room_bytes=device.room_bytes // ranks,
        kv_bytes=kv_bytes if rest >= 0 else 0,
        pages=pages,
        rank_tokens=own * geometry.page_tokens(1),
        layouts=tuple(layouts),
        reason=reason,
    )


def _reason(facts: ModelFacts, division: Division, rest: int, kv_bytes: int, pages: int) -> str:
    """Return why ranks would not start, as they would say it (worker/engine/rank_engine.py)."""
    widest = division.widths[-1]
    try:
        need = facts.geometry.pages_for_tokens(facts.length, widest) + 1
    except GeometryError as error:
        return str(error)
    if rest < 0:
        return "The weights and what steps need exceed the memory."
    if kv_bytes > rest:
        return TOO_MUCH_KV
    if pages < need:
        return (
            f"A request of {facts.length:,} tokens needs {need:,} pages of KV, and {pages:,} fit."
        )
    return ""


def _layout_plan(layout: Layout, facts: ModelFacts, own_pages: int) -> LayoutPlan:
    geometry = facts.geometry
    tokens = tuple(own_pages * geometry.page_tokens(group.width) for group in layout.groups)
    return LayoutPlan(format_layout(layout), tokens, min(facts.length, max(tokens)))


def longest_length(facts: ModelFacts, plan: CellPlan) -> int:
    """Return the longest request with which the cell starts; 0 if there is none."""
    width = plan.division.widths[-1]
    return max(0, plan.pages - 1) * facts.geometry.page_tokens(width)


def fewest_gpus(
    facts: ModelFacts,
    device: Device,
    most: int,
    refusal_of: Callable[[Division], str] = lambda _: "",
) -> CellPlan | None:
    """Return the first cell that starts of 1, 2, 4 … `most` GPUs, its weights divided least.

    Widths that heads or experts do not allow are left out; `refusal_of` says why the model cannot
    be served in a division, or nothing.
    """
    ranks = 1
    while ranks <= most:
        for each in divisions(facts.size, ranks):
            plan = plan_cell(facts, device, each, refusal_of(each))
            if plan.fits:
                return plan
        ranks *= 2
    return None


def divisions(
    size: ModelSize,
    ranks: int,
    mixed: Sequence[Mixed] = (),
    whole_layers: int = 0,
) -> Iterator[Division]:
    """Yield the ways to hold the weights: whole, then in 2, 4 … parts with each way to borrow."""
    widths = [1]
    while (wide := 2 * widths[-1]) <= ranks and ranks % wide == 0 and _divides(size, wide):
        widths.append(wide)
    yield Division(ranks, tuple(widths), mixed=tuple(mixed))
    for parts in widths[1:]:
        for borrow in ("ffn", "all", "none"):
            whole = 0 if borrow == "none" else whole_layers
            held = () if parts == widths[-1] else (Mixed(widths[-1] // parts, parts),)
            shapes = tuple(dict.fromkeys((*held, *(m for m in mixed if m.tp % parts == 0))))
            yield Division(ranks, tuple(widths), parts, borrow, whole, shapes)


def with_lone_ranks(
    found: Iterable[Division], refusal_of: Callable[[Division], str]
) -> Iterator[Division]:
    """Yield divisions, and one of lone ranks where these serve what groups do not.

    Some packed weights have no view of a part, and one rank serves them whole.
    """
    for each in found:
        yield each
        if each.parts == 1 and len(each.widths) > 1 and refusal_of(each):
            lone = replace(each, widths=(1,), mixed=(), alone=True)
            if not refusal_of(lone):
                yield lone


def _divides(size: ModelSize, width: int) -> bool:
    """Return whether groups of this width can share out the model's heads and features."""
    kv_heads = size.kv_heads
    shares_kv = kv_heads % width == 0 or width % kv_heads == 0
    inner = size.experts if size.expert_layers else size.dense_elements // size.hidden
    return size.heads % width == 0 and shares_kv and inner % width == 0
