"""Ranks of one group without a cell, whose leader lets a test choose how each step is computed.

Run in processes: `tests.harness.cells.step_ranks SPEC.json OUT.pkl`. SPEC has the
model folder, the number of ranks, engine arguments, `requests` (prompts and the parameters of
`reshard_cases`) and `runs`: names of choosers; `parts`, if each rank holds one of several parts of
the weights, and what they `borrow`, but of `whole_layers`; `alone`, if that rank leads in dp and
the others only lend; `interpreted`, if kernels for quantized weights are plain torch's; `poison`,
if slots hold NaN while no step may read them. With `again`, the rank is then killed, and a process
that takes its place in the others' memory does all runs again; with `kills_lenders`, all others are
killed before. Every run does all requests; OUT has {run: {"streams": [...], "modes": {mode:
steps}, "weights": bytes, "loaded": bytes, "spoiled": slots of loans}}, or a list of two such. Only
the choice of each step's mode is replaced; the rest is the product.
"""

import contextlib
import functools
import json
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comm_pool.layout import Group, Mode, Rank, StepMode
from comm_pool.mixed import read_mixed
from coordinator.protocol.config import Config, check_config
from coordinator.protocol.messages.rank import Place
from coordinator.protocol.terms import Binding, Tier
from tests.harness.cells.bare_cell import Stream, search_path, take
from tests.harness.cells.servers import free_port
from tests.harness.cells.warm import run_module
from tests.harness.vllm.engine_request import encoded_request
from tests.harness.vllm.reshard_cases import vllm_settings
from worker.launch.launcher import fork_rank
from worker.memories import Memories, memory_of

Choice = Callable[[int], StepMode]
"""Tokens of a step -> how to compute it."""

TIME_LIMIT_S = 450
BORN = 1


def chooser(run: str, mixed: Sequence[str], *, has_sp: bool = True) -> Choice:
    """`tp`, `sp`, a mixed shape, or `random-SEED`: any of them for each step by chance.

    Ranks that hold one of several parts of the weights and borrow none have no sp.
    """
    word, _, seed = run.partition("-")
    shapes = [read_mixed(each) for each in mixed]
    if word in mixed:
        return lambda _tokens: read_mixed(word)
    if word != "random":
        return lambda _tokens: Mode(word)
    draw = random.Random(seed)
    modes: list[StepMode] = [Mode.TP, *([Mode.SP] if has_sp else []), *shapes]
    return lambda _tokens: draw.choice(modes)


def has_sp(spec: dict[str, Any]) -> bool:
    """Whether the ranks of a SPEC can compute with all weights."""
    return bool(spec.get("parts", 1) == 1 or spec.get("borrow", "none") != "none")


class Collector:
    """Stands where the outlet sends to gateways from."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}

    def push(self, _reply_to: str, header: Any, outputs: Any) -> None:
        """Add what the leader says to the streams."""
        for span, output in zip(header.spans, outputs, strict=True):
            take(self.streams[span.task], span, output)


def lead(member: Any, binding: Binding, collector: Collector, spec: dict[str, Any]) -> Any:
    """Do all runs as the group's leader, then let the followers go."""
    from tests.harness.faults.poisoned_ring import spoiled
    from worker.engine.mode import PreparedMode
    from worker.io.step_queue import Begin, LeaveGroup

    pages = member.engine.kv.num_pages - 1
    member.lead(Begin(BORN, (), pages))
    member.begin(pages, (), -1)
    scheduler = member.mode_of(binding.group).scheduler
    results = {}
    for run in spec["runs"]:
        spoiled.clear()
        choose = chooser(run, spec.get("mixed", ()), has_sp=has_sp(spec))
        modes = Counter[str]()

        def mode_of_step(
            _self: Any, _group: Group, tokens: int, choose: Choice = choose, modes: Any = modes
        ) -> StepMode:
            mode = choose(tokens)
            modes[str(mode)] += tokens > 0
            return mode

        PreparedMode.mode_of_step = mode_of_step  # type: ignore[method-assign, assignment]
        for number, request in enumerate(spec["requests"]):
            name = f"{run}-{number}"
            collector.streams[name] = Stream()
            settings = vllm_settings(request["params"])
            header, payload = encoded_request(name, request["prompt"], "", Tier.STANDARD, settings)
            member.place(Place(header, 1, binding, payload), binding)
        while member.has_work:
            member.lead_step(1)
        streams = [collector.streams.pop(f"{run}-{n}") for n in range(len(spec["requests"]))]
        results[run] = {
            "streams": streams,
            "modes": dict(modes),
            "weights": member.engine.replica_bytes,
            "spoiled": spoiled.total(),
            "loaded": member.engine.loaded_bytes,
        }
        if not spec.get("keeps_cache"):
            assert scheduler.reset_prefix_cache()
    member.lead(LeaveGroup(BORN, None))
    return results


def serve(
    config: Config,
    base: Any,
    rank: Rank,
    memory: Any,
    spec: dict[str, Any],
    out: Path,
    *,
    joins: bool = False,
) -> None:
    """Build one rank and do its part; ranks of which one is alone stay until they are killed."""
    from tests.harness.faults import poisoned_ring
    from worker.cohort import Cohort
    from worker.io.step_queue import LeaveGroup
    from worker.launch.process import build_engine
    from worker.rank.runtime import GroupRuntime
    from worker.spec import everyone, rank_spec

    cohort = Cohort(0, everyone(config), config.cell.dist_port, joins)
    own, whole = rank_spec(config, rank, cohort, Memories(memory)), spec.get("whole_layers", 0)
    own = replace(own, whole_layers=whole[rank] if isinstance(whole, list) else whole)
    if spec.get("poison"):
        poisoned_ring.install()
    engine = build_engine(base, own)
    collector = Collector()
    member = GroupRuntime(engine, 1, collector)
    everybody = tuple(Rank(each) for each in range(config.cell.ranks))
    alone = spec.get("alone")
    group = Group(everybody, Mode.SHIFT if len(everybody) > 1 else Mode.DP)
    if alone is not None:
        group = Group((Rank(alone),), Mode.DP)
    binding = Binding(group, BORN)
    if rank in group.ranks:
        member.join(binding)
    if rank == group.leader:
        results = lead(member, binding, collector, spec)
        written = out.with_suffix(".new")
        written.write_bytes(pickle.dumps(results))
        written.rename(out)
    elif rank in group.ranks:
        while not isinstance(member.follow(binding, wait_s=1.0), LeaveGroup):
            pass
    if alone is not None:
        signal.pause()
    else:
        engine.communicators.of_width(group.width).group.barrier()


def run_steps(folder: Path, spec: dict[str, Any]) -> Any:
    """Run the ranks of SPEC; returns what stands in OUT, or fails with what they said."""
    given, out = folder / "steps.json", folder / "steps.pkl"
    given.write_text(json.dumps(spec))
    code, said = run_module(
        "worker",
        "tests.harness.cells.step_ranks",
        [str(given), str(out)],
        env={**os.environ, "PYTHONPATH": search_path()},
        limit_s=TIME_LIMIT_S,
    )
    assert code == 0, said[-6000:]
    return pickle.loads(out.read_bytes())


def main() -> int:
    """Start all ranks and wait for them."""
    from worker.engine.config import replica_config
    from worker.engine.device import prepare_launcher

    spec, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ranks, parts, borrow = spec["ranks"], spec.get("parts", 1), spec.get("borrow", "none")
    if spec.get("interpreted"):
        from tests.harness.vllm import cpu_kernels

        cpu_kernels.install()
    config = check_config(
        {
            "model": {
                "path": spec["model"],
                "served_name": "demo",
                "engine_args": spec["engine_args"],
            },
            "cell": {
                "ranks": ranks,
                "device": spec.get("device", "cpu"),
                "layout": f"dp{ranks}" if parts == 1 or borrow != "none" else f"tp{ranks}",
                "weight_parts": parts,
                "borrow": borrow,
                "widths": spec.get("widths", [1, ranks]),
                "mixed": spec.get("mixed", []),
                "exchange_parts": spec.get("exchange_parts", [1]),
                "dist_port": free_port(),
            },
            "run_dir": str(out.parent),
        }
    )
    base = replica_config(config)
    prepare_launcher(base)
    memory = memory_of(config) if config.cell.device == "cpu" else None

    def fork(rank: int, results: Path, *, joins: bool = False) -> int:
        run = functools.partial(serve, config, base, Rank(rank), memory, spec, results, joins=joins)
        return fork_rank(Rank(rank), run)

    pids = [fork(rank, out) for rank in range(ranks)]
    if (alone := spec.get("alone")) is None:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        return 1 if any(codes) else 0
    found = [_results_of(pids[alone], out)]
    if spec.get("again"):
        for rank, pid in enumerate(pids):
            if rank == alone or spec.get("kills_lenders"):
                _end(pid)
        again = out.with_suffix(".again")
        pids[alone] = fork(alone, again, joins=True)
        found.append(_results_of(pids[alone], again))
        out.write_bytes(pickle.dumps(found))
    return 0


def _results_of(pid: int, out: Path) -> Any:
    """Wait for the results of a rank."""
    while not out.exists():
        ended, status = os.waitpid(pid, os.WNOHANG)
        assert not ended, f"the rank has ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    return pickle.loads(out.read_bytes())


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
