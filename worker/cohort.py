"""Ranks that are started together."""

from dataclasses import dataclass

from comm_pool.layout import Rank


@dataclass(frozen=True, slots=True)
class Cohort:
    """Neighbouring ranks that are started together, and the port at which they find each other."""

    number: int
    ranks: tuple[Rank, ...]
    port: int
    joins: bool = False
    """The others serve already, and share their memory with who is started."""
