"""Ranks that start together."""

from dataclasses import dataclass

from comm_pool.layout import Rank


@dataclass(frozen=True, slots=True)
class Cohort:
    """Neighbouring ranks that start together, and the port at which they find each other."""

    number: int
    ranks: tuple[Rank, ...]
    port: int
    joins: bool = False
    """Whether other ranks serve already and share their memory with these."""
