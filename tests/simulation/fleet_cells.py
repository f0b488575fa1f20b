"""Several simulated cells behind the gateways' placement: the product's, on what cells told last.

Cells tell their load ten times a second, so requests are placed by what is up to 0.1 s old and by
what was sent since, as a gateway does it.
"""

from collections.abc import Sequence

from coordinator.protocol.terms import TaskId
from gateway.fleet.placement import Candidate, Needs, choose
from tools.simulator.cell import Arrival, Run, SimCell

TELL_S = 0.1


def run_fleet(cells: Sequence[SimCell], arrivals: Sequence[Arrival], until_s: float) -> list[Run]:
    """Serve requests, in order of their times, by several cells; returns what each made of its."""
    names = [f"cell-{number}" for number in range(len(cells))]
    by_name = dict(zip(names, cells, strict=True))
    waiting = iter(arrivals)
    due = next(waiting, None)
    now_s = 0.0
    while due is not None:
        now_s += TELL_S
        for cell in cells:
            cell.advance(now_s - TELL_S)
        loads = {name: cell.load for name, cell in by_name.items()}
        sent = dict.fromkeys(names, 0)
        while due is not None and due.at_s < now_s:
            needs = Needs(TaskId(f"{due.at_s}"), due.tier, due.prompt + due.output)
            seen = [
                Candidate(name, True, False, True, 4, 0, loads[name], sent[name]) for name in names
            ]
            chosen = choose(needs, seen)
            assert chosen is not None, "no cell is open."
            sent[chosen] += 1
            by_name[chosen].offer(due)
            due = next(waiting, None)
    for cell in cells:
        cell.advance(until_s)
    return [cell.end() for cell in cells]
