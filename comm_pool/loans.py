"""Which parts of the weights a rank that is alone borrows, from whom, and into which slots. Pure.

The weights fall into n parts, and a rank holds one part of every layer (ADR 0044). A rank that is
alone computes the shares of the others itself, with parts that it borrows: it copies each part that
it lacks from a lender into a slot of its ring, one loan after another, while it computes with the
parts before. This is weights as a service (WaS, SiDP, section 4.2), by part instead of by layer:
so wide groups compute with what their ranks hold, and every layer draws on all lenders alike.

SiDP shifts peaks (section 4.2, Fig. 10): its ranks begin with different layers, so that they read
from different owners. Here every rank begins with its own part and goes on with the parts that
follow, so at one loan number the lenders of all ranks are a permutation of the ranks.

In all functions `ranks` ranks share out `parts` parts, a power of two that divides `ranks`; ranks
and parts are numbered from 0. Of a cell with several groups of the widest kind, each group counts
for itself, and a rank's number is its place in the group. Other numbers break an assertion.
`layers` counts what is borrowed as one, in the order of use within a step: for example the feed
forward network of each layer. `holders` are the ranks whose part can be read: living ranks, and
ranks whose memory outlives them. A rank's own part can always be read.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


class LoanError(ValueError):
    """A part that a rank lacks and no rank can lend; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Loan:
    """One part of one layer on its way into a slot of the ring; its number is its index in a plan.

    It may be copied as soon as loan `after`, the last before it in the same slot, is out of use;
    from the start of the step if `after` is None. `lender` is the rank to copy it from.
    """

    layer: int
    part: int
    lender: int
    slot: int
    after: int | None


def part_of(rank: int, ranks: int, parts: int) -> int:
    """Return the part that a rank holds, 0..parts-1."""
    assert 0 <= rank < ranks, "a rank is not among those that share out the parts."
    return rank // _holders_per_part(ranks, parts)


def holders_of(part: int, ranks: int, parts: int) -> range:
    """Return the ranks that hold a part: neighbours, ranks/parts of them."""
    assert 0 <= part < parts, "the weights have no such part."
    count = _holders_per_part(ranks, parts)
    return range(part * count, (part + 1) * count)


def order_of(rank: int, ranks: int, parts: int) -> tuple[int, ...]:
    """Return all parts in the order in which a rank computes with them, its own first."""
    own = part_of(rank, ranks, parts)
    return tuple((own + step) % parts for step in range(parts))


def loan_plan(
    rank: int,
    ranks: int,
    parts: int,
    layers: int,
    *,
    whole: Collection[int] = frozenset(),
    holders: Collection[int] | None = None,
    slots: int | None = None,
) -> tuple[Loan, ...]:
    """Return the loans of one step of a rank, in the order in which it copies and uses them.

    Layers ascend, without those in `whole`, of which the rank holds all parts; within a layer the
    order is `order_of`'s without the own part. `holders` are all ranks unless given. The ring has
    `slots` slots, at least 1 and as many as parts unless given; loans take them in turn, so at most
    `slots` loans are copied or in use at once.

    A part's lender has the rank's own place among the holders of its part. The readers of a lost
    holder go to the others, so that the numbers of readers of a part's holders differ by at most 1.

    Raises `LoanError` if the holders lack a part that the rank lacks, whatever layers are whole.
    """
    slots = parts if slots is None else slots
    assert slots >= 1, "a ring has at least one slot."
    assert all(0 <= layer < layers for layer in whole), "a whole layer is not in the model."
    readable = frozenset(range(ranks) if holders is None else holders)
    if missing := _missing(rank, ranks, parts, readable):
        raise LoanError(_refusal(rank, ranks, parts, missing))
    of_a_layer = [
        (part, _lender(rank, holders_of(part, ranks, parts), readable))
        for part in _lacking(rank, ranks, parts)
    ]
    wanted = [
        (layer, *each) for layer in range(layers) if layer not in whole for each in of_a_layer
    ]
    return tuple(
        Loan(*each, number % slots, number - slots if number >= slots else None)
        for number, each in enumerate(wanted)
    )


def floor_s(borrowed: int, bytes_per_s: float) -> float:
    """Return the least time of a step that borrows, in seconds: its loans, one after another.

    `borrowed` is in bytes per step; `bytes_per_s`, above 0, is what one rank copies while all do.
    """
    assert bytes_per_s > 0, "a link has a rate."
    return borrowed / bytes_per_s


def spread_whole(layers: int, count: int) -> frozenset[int]:
    """Return which layers are whole if `count` of them are, 0..layers, evenly over the model.

    The numbers of other layers between one whole layer and the next differ by at most 1, also from
    the last one to the end, as a step begins with a whole layer: the copies for the layer after it
    have its time.
    """
    assert 0 <= count <= layers, "more layers are whole than the model has."
    return frozenset(turn * layers // count for turn in range(count))


def fewest_whole_layers(
    part_bytes: Sequence[int], parts: int, bytes_per_s: float, floor_s_max: float
) -> int:
    """Return the least `count` whose `spread_whole` has a floor of at most `floor_s_max` seconds.

    `part_bytes[layer]` is the size of one part of each layer, in bytes; `bytes_per_s` is as in
    `floor_s`; `floor_s_max` is at least 0, which makes all layers whole.
    """
    assert floor_s_max >= 0, "no step has a negative floor."
    layers = len(part_bytes)
    for count in range(layers):
        whole = spread_whole(layers, count)
        lacking = sum(size for layer, size in enumerate(part_bytes) if layer not in whole)
        if floor_s(lacking * (parts - 1), bytes_per_s) <= floor_s_max:
            return count
    return layers


def most_whole_layers(part_bytes: Sequence[int], parts: int, bytes_max: int) -> int:
    """Return the largest `count` whose `spread_whole` takes at most `bytes_max` more bytes.

    `part_bytes[layer]` is the size of one part of each layer; a rank holds one already.
    """
    layers = len(part_bytes)
    for count in range(layers, 0, -1):
        held = sum(part_bytes[layer] for layer in spread_whole(layers, count))
        if held * (parts - 1) <= bytes_max:
            return count
    return 0


def _holders_per_part(ranks: int, parts: int) -> int:
    assert parts >= 1, "weights have at least one part."
    assert parts & (parts - 1) == 0, "the number of parts is not a power of two."
    assert ranks % parts == 0, "the parts do not divide the ranks."
    return ranks // parts


def _lacking(rank: int, ranks: int, parts: int) -> tuple[int, ...]:
    return order_of(rank, ranks, parts)[1:]


def _missing(rank: int, ranks: int, parts: int, readable: frozenset[int]) -> list[int]:
    """Return the parts that the rank lacks and nobody can lend, in its order."""
    lacking = _lacking(rank, ranks, parts)
    return [part for part in lacking if readable.isdisjoint(holders_of(part, ranks, parts))]


def _lender(rank: int, holders: range, readable: frozenset[int]) -> int:
    """Return which holder of a part lends it to the rank; at least one of them is readable.

    The first lost holder's readers go to the first readable one, the second's to the second, and
    again from the first.
    """
    wished = holders[rank % len(holders)]
    if wished in readable:
        return wished
    lenders = [each for each in holders if each in readable]
    lost = [each for each in holders if each not in readable]
    return lenders[lost.index(wished) % len(lenders)]


def _refusal(rank: int, ranks: int, parts: int, missing: Iterable[int]) -> str:
    named = " and ".join(
        f"part {part} ({_either(holders_of(part, ranks, parts))})" for part in missing
    )
    return f"rank {rank} lacks {named}, and none of these ranks lives: start one for each part."


def _either(holders: range) -> str:
    return " or ".join(f"rank {each}" for each in holders)
