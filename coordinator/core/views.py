"""The core's views for operators, in the shape in which the admin API returns them.

Plain dictionaries of numbers, texts and lists; reading changes nothing. The core calls this module.
"""

from collections import Counter

from comm_pool.layout import Group, Mode, Rank, format_layout
from coordinator.model.cost_model import floors_us
from coordinator.model.records import Decision, SwitchRecord
from coordinator.policy.alternator import AlternationView
from coordinator.protocol.messages.rank import Probed, RankHello
from coordinator.protocol.terms import Binding, Tier
from coordinator.ranks.roster import RankRecord, Roster, blocks_per_page, kv_tokens
from coordinator.switching.switcher import Switcher
from coordinator.tasks.task import State, Task
from coordinator.tasks.task_table import TaskTable

View = dict[str, object]


def layout_view(switcher: Switcher, roster: Roster) -> View:
    """Return the served layout, the wanted layout, and its groups."""
    return {
        "layout": format_layout(switcher.served_layout, roster.world),
        "epoch": switcher.epoch,
        "target": format_layout(switcher.target.layout, roster.world),
        "serving": switcher.is_serving and any(map(roster.serves, switcher.target.layout.groups)),
        "recovering": switcher.recovering,
        "groups": [_group_view(binding, roster) for binding in switcher.target.bindings],
        "out_of_service": [_probe_view(each) for each in roster.guard.barred.values()],
    }


def ranks_view(switcher: Switcher, roster: Roster, lease_ms: int, now_ms: int) -> View:
    """Return the state of each rank; a rank that was never heard has only its number."""
    ranks = []
    for rank in map(Rank, range(roster.world)):
        if rank in roster:
            view = _rank_view(rank, roster[rank], now_ms)
            view["lease_left_ms"] = max(0, lease_ms - roster.silent_since(rank, now_ms))
            view["degraded"] = roster.is_degraded(rank)
            view["pages_free"] = _pages_free(rank, roster)
            view["closed"] = sorted(roster[rank].closed)
        else:
            view = {"rank": rank, "phase": "never heard"}
        view["available"] = rank in switcher.alive
        ranks.append(view)
    return {"ranks": ranks, "probes": [_probe_view(each) for each in roster.guard.newest()]}


def switch_view(record: SwitchRecord) -> View:
    """Return one switch."""
    return {
        "epoch": record.epoch,
        "from": record.from_layout,
        "to": record.to_layout,
        "cause": record.cause,
        "started_ms": record.started_ms,
        "carry": record.carry.value,
        "tasks": dict(record.tasks),
        "decide_ms": record.decide_ms,
        "precopy_rounds": record.precopy_rounds,
        "precopy_bytes": record.precopy_bytes,
        "precopy_ms": record.precopy_ms,
        "park_ms": record.park_ms,
        "reshard_ms": record.reshard_ms,
        "reshard_bytes": record.reshard_bytes,
        "swap_ms": record.swap_ms,
        "first_step_ms": record.first_step_ms,
        "cut_over_ms": record.cut_over_ms,
        "stall_ms": record.stall_ms,
        "gap_ms_max": record.gap_ms_max,
        "total_ms": record.total_ms,
        "outcome": record.outcome.value,
    }


def decision_view(decision: Decision) -> View:
    """Return one decision."""
    return {
        "time": decision.time_ms,
        "inputs": dict(decision.inputs),
        "candidates": [dict(candidate) for candidate in decision.candidates],
        "choice": decision.choice,
        "carry": decision.carry.value,
        "reason": decision.reason,
        "cause": decision.cause,
        "changes": decision.changes,
        "since": decision.since_ms,
    }


def alternation_view(alternation: AlternationView) -> View:
    """Return what the alternation of batch work is and did."""
    return {
        "phase": alternation.phase.value,
        "reason": alternation.reason,
        "cycles": alternation.cycles,
        "seconds": dict(alternation.seconds),
        "requests": alternation.requests,
        "single_seconds": alternation.single_s,
    }


def step_times_view(roster: Roster) -> View:
    """Return step times by width and mode, as measured by the lowest rank that has any.

    Ranks may differ in their loans and in their KV memory: the longest floor and the smallest KV
    memory of all ranks count.
    """
    record = next((roster[rank] for rank in roster if roster[rank].hello.step_times), None)
    hellos = [roster[rank].hello for rank in roster]
    times_of_all = [times for hello in hellos for times in hello.step_times]
    return {
        "step_times": [
            {
                "width": times.width,
                "sp_from_tokens": times.sp_from_tokens,
                "mixed_from_tokens": dict(times.mixed_from_tokens),
                "floor_ms": {
                    mode: us / 1000 for mode, us in floors_us(times_of_all, times.width).items()
                },
                "pace_tokens": dict(times.pace_tokens),
                "kv_tokens": kv_tokens(hellos, times.width),
                "curves": {
                    mode: [{"tokens": tokens, "ms": us / 1000} for tokens, us in points]
                    for mode, points in times.curves
                },
            }
            for times in (record.hello.step_times if record else ())
        ],
        "borrowing_bytes": _borrowing_bytes(record.hello) if record else {},
    }


def _borrowing_bytes(hello: RankHello) -> dict[str, int]:
    """Return the memory that a rank keeps in order to borrow, by what it is for."""
    memory = dict(hello.memory)
    return {name: memory[name] for name in ("ring", "whole_layers") if memory.get(name)}


def queue_view(tasks: TaskTable) -> View:
    """Return the unfinished tasks by state and tier; `oldest_ms` is when the oldest arrived."""
    states: Counter[State] = Counter()
    held: Counter[Tier] = Counter()
    queued: dict[Tier, list[Task]] = {tier: [] for tier in Tier}
    for task in tasks:
        states[task.state] += 1
        if task.state is State.QUEUED:
            queued[task.header.tier].append(task)
        else:
            held[task.header.tier] += 1
    return {
        "tasks": {state.value: states[state] for state in State},
        "tiers": {
            tier.name.lower(): {
                "queued": len(waiting),
                "tokens": sum(task.context_tokens_max for task in waiting),
                "oldest_ms": min((task.arrived_ms for task in waiting), default=None),
                "placed": held[tier],
            }
            for tier, waiting in queued.items()
        },
    }


def _probe_view(probed: Probed) -> View:
    return {
        "mode": probed.mode,
        "ranks": list(probed.ranks),
        "epoch": probed.epoch,
        "error_nats": probed.error_nats,
        "error_max_nats": probed.error_max_nats,
        "took_ms": probed.took_us / 1000,
    }


def _group_view(binding: Binding, roster: Roster) -> View:
    group = binding.group
    view: View = {
        "ranks": list(group.ranks),
        "mode": group.mode.value,
        "width": group.width,
        "name": group.name,
        "leader": group.leader,
        "formation": binding.formation,
    }
    record = roster.get(group.leader)
    report = record.report if record else None
    is_bound = report is not None and report.binding == binding
    slots = _slots(group, record)
    view |= {
        "running": report.running if report and is_bound else 0,
        "waiting": report.waiting if report and is_bound else 0,
        "paused": report.paused if report and is_bound else 0,
        # A page of each member holds as many blocks as it has slots.
        "pages_free": report.blocks_free // slots if report and is_bound else 0,
        "pages_total": report.blocks_total // slots if report and is_bound else 0,
        "blocks_total": report.blocks_total if report and is_bound else 0,
        "block_tokens": record.hello.tokens_per_slot if record else 0,
    }
    return view


def _slots(group: Group, leader: RankRecord | None) -> int:
    """Return how many blocks a page of each member holds."""
    return blocks_per_page(leader.hello, group.width, group.stages) if leader else 1


def _pages_free(rank: Rank, roster: Roster) -> int | None:
    """Return the pages of a rank that a request can get; None before its first report.

    A group leases all pages of its members as soon as it serves, so that nearly none are free in
    the rank's own account: the free ones are those that the group's leader has not filled.
    """
    report = roster[rank].report
    if report is None:
        return None
    if report.binding is None:
        return report.pages.free
    group = report.binding.group
    leader = roster.get(group.leader)
    if leader is None or leader.report is None or leader.report.binding != report.binding:
        return report.pages.free
    return report.pages.free + leader.report.blocks_free // _slots(group, leader)


def _weights_view(hello: RankHello) -> View:
    return {
        "part": hello.part,
        "parts": hello.parts,
        "borrow": hello.borrow,
        "whole_layers": hello.whole_layers,
        "borrowing_bytes": _borrowing_bytes(hello),
        "floor_ms": {
            # The names of mixed groups have their widths.
            f"{name}{times.width}" if name in set(Mode) else name: us / 1000
            for times in hello.step_times
            for name, us in times.floor_us
        },
    }


def _rank_view(rank: Rank, record: RankRecord, now_ms: int) -> View:
    view: View = {
        "rank": rank,
        "pid": record.hello.pid,
        "device": record.hello.device,
        "incarnation": record.incarnation,
        "restarts": record.restarts,
        "connected": record.is_connected,
        "exited": record.has_exited,
        "heartbeat_age_ms": now_ms - record.heard_at_ms,
        "out_ms": max(0, record.out_until_ms - now_ms),
        "memory": dict(record.hello.memory),
        "weights": _weights_view(record.hello),
    }
    report = record.report
    if report is None:
        return view | {"phase": "never reported"}
    return view | {
        "phase": report.stage.phase.name.lower(),
        "epoch": report.stage.epoch,
        "group": list(report.binding.group.ranks) if report.binding else [],
        "cut_off": [link.reply_to for link in report.links if link.is_open],
        "pages": {
            "total": report.pages.total,
            "free": report.pages.free,
            "owned": report.pages.owned,
            "leased": report.pages.leased,
        },
        "gauges": dict(report.gauges),
    }
