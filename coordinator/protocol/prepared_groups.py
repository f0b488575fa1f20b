"""The groups that ranks prepare only if the configuration names them: mixed and pipeline groups.

Pure; `Config` calls it to check itself, the launcher and each rank to prepare them.
"""

from collections.abc import Collection, Iterable
from typing import Protocol

from comm_pool.layout import Group, Mode
from comm_pool.mixed import (
    Mixed,
    MixedError,
    Staged,
    StagedError,
    read_mixed,
    read_staged,
    shape_of_parts,
)


class Cell(Protocol):
    """What decides it, of the section `cell`."""

    @property
    def device(self) -> str:
        """Kind of the ranks' devices."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of ranks that a group may have."""

    @property
    def mixed(self) -> tuple[str, ...]:
        """The mixed groups that it names."""

    @property
    def pipelines(self) -> tuple[str, ...]:
        """The pipeline groups that it names."""

    @property
    def weight_parts(self) -> int:
        """Parts of the weights."""


def mixed_groups(cell: Cell, groups: Iterable[Group]) -> tuple[Mixed, ...]:
    """Return the mixed shapes to prepare, with those of the layout's groups.

    Raises ValueError if ranks cannot prepare one.
    """
    named = {each.mixed for each in groups if each.mixed is not None}
    parts, widest = cell.weight_parts, max(cell.widths, default=1)
    held = shape_of_parts(widest, parts) if parts > 1 else None
    for text in (*cell.mixed, *([str(held)] if held else [])):
        try:
            mixed = read_mixed(text)
        except MixedError as error:
            raise ValueError(f"cell.mixed: {error}") from error
        _require_widths("mixed", mixed, {mixed.width, mixed.sp}, cell.widths)
        named.add(mixed)
    if (coarse := next((each for each in sorted(named) if each.tp % parts), None)) is not None:
        raise ValueError(
            f"{coarse} computes with {coarse.tp} parts of the weights, and ranks hold one of "
            f"{parts}: use mixed shapes whose tp is a multiple of cell.weight_parts."
        )
    return tuple(sorted(named))


def pipeline_groups(cell: Cell, groups: Iterable[Group]) -> tuple[Staged, ...]:
    """Return the pipeline groups to prepare, likewise."""
    named = {Staged(each.stages, each.tp) for each in groups if each.mode is Mode.PP}
    for text in cell.pipelines:
        try:
            named.add(read_staged(text))
        except StagedError as error:
            raise ValueError(f"cell.pipelines: {error}") from error
    for staged in sorted(named):
        if cell.device != "cpu" and staged.tp > 1:
            raise ValueError(
                f"{staged} has stages of {staged.tp} ranks, which only CPU ranks run yet: use "
                f"'pp{staged.width}' or 'tp{staged.width}', or cell.device cpu."
            )
        if cell.weight_parts > 1:
            raise ValueError(
                f"{staged} is a pipeline group, which needs all of the weights on each rank: use "
                f"'tp{staged.width}', or leave out --weight-parts."
            )
        _require_widths("pipelines", staged, {staged.width, staged.tp} - {1}, cell.widths)
    return tuple(sorted(named))


def _require_widths(
    setting: str, shape: Mixed | Staged, wanted: set[int], widths: Collection[int]
) -> None:
    if missing := wanted.difference(widths):
        raise ValueError(
            f"cell.{setting}: {shape} needs groups {min(missing)} wide: add that to "
            "cell.widths (--widths), or leave it out."
        )
