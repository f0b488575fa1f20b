"""Shapes of re-shard inputs, as hypothesis draws them."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.harness.kv.reshard_inputs import Shape, Tiling

POWERS = (1, 2, 4, 8)


@st.composite
def tilings(draw: st.DrawFn, first: int, width: int) -> Tiling:
    """Aligned power-of-two groups that cover a span."""
    if width == 1 or draw(st.booleans()):
        return (tuple(range(first, first + width)),)
    half = width // 2
    return (*draw(tilings(first, half)), *draw(tilings(first + half, half)))


@st.composite
def stages(draw: st.DrawFn, groups: Tiling) -> tuple[int, ...]:
    """Of each group how many pipeline stages it has: one, as many as ranks, or between."""
    return tuple(
        draw(st.sampled_from([each for each in POWERS if each <= len(ranks)])) for ranks in groups
    )


@st.composite
def staged_shapes(draw: st.DrawFn) -> Shape:
    """Shapes of which some groups are pipeline groups."""
    shape = draw(shapes())
    old, new = draw(stages(shape.old)), draw(stages(shape.new))
    layers = max(*old, *new) * draw(st.sampled_from([1, 3]))
    return replace(shape, old_stages=old, new_stages=new, num_layers=layers)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes of which no group has pipeline stages."""
    units = draw(st.sampled_from(POWERS))
    first = units * draw(st.integers(0, 1))
    whole = (tuple(range(first, first + units)),)
    parts = draw(tilings(first, units))
    old, new = draw(st.sampled_from([(whole, parts), (parts, whole)]))
    return Shape(
        old=old,
        new=new,
        num_heads=units * draw(st.sampled_from([1, 2, 3])),
        num_pages=draw(st.integers(1, 28)),
        more_pages=draw(st.sampled_from([0, 0, 1, 5, 30])),
        tasks=draw(st.integers(0, 5)),
        cached=draw(st.integers(0, 3)),
        fill=draw(st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0])),
        spare=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        keyed=draw(st.booleans()),
        rounds_max=draw(st.sampled_from([1, 2, 8])),
        seed=draw(st.integers(0, 2**32)),
    )
