"""Where the host's time of a prefill goes, on every rank of one group: for GPU boxes.

`python -m tests.bench.profile_steps --shape llama-3-70b-fp8-short --ranks 2 --out DIR` builds the
ranks of one tp group without a cell, serves single prompts one after the other, writes when each
rank got the step, had launched it, and (leader) had its token: JSON, medians in milliseconds since
the moment the leader began. A second round runs under cProfile; its tables are DIR/rank-N.txt.
`--cell` does the same in a whole cell, whose ranks are `tests.bench.profiled_worker`, and prints
what a client below the gateway sees.
"""

import argparse
import asyncio
import cProfile
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.config import Config, check_config
from coordinator.protocol.messages import Binding, Place, Tier
from tests.bench.gpu_load import GREEDY
from tests.bench.gpu_shapes import COMPILATION, as_arguments, engine_options, write_shape
from tests.bench.profiled_worker import table_of
from tests.bench.servers import free_port
from tests.harness.bare_cell import BareCell, encoded_request
from worker.launcher import fork_rank

BORN = 1
TURNS = 12
SWITCHES = 12


class Ear:
    """Stands where the outlet sends to gateways from, and notes when."""

    def __init__(self) -> None:
        self.heard_ns: list[int] = []

    def push(self, _reply_to: str, _header: Any, _outputs: Any) -> None:
        """Note the time."""
        self.heard_ns.append(time.monotonic_ns())


class Stopwatch:
    """When a member's steps began and were launched."""

    def __init__(self, member: Any) -> None:
        self.steps: list[tuple[int, int]] = []
        execute = member._execute

        def timed(mode: Any, plan: Any) -> Any:
            began = time.monotonic_ns()
            result = execute(mode, plan)
            self.steps.append((began, time.monotonic_ns()))
            return result

        member._execute = timed


def serve_prompts(
    member: Any, binding: Binding, watch: Stopwatch, ear: Ear, tag: str, options: Any
) -> list[Any]:
    """Serve prompts one after the other; rows of (tokens, began, launch began, launched, heard)."""
    rows = []
    for tokens in options.tokens:
        for turn in range(TURNS):
            name = f"{tag}-{tokens}-{turn}"
            params = {**GREEDY, "max_tokens": 1}
            prompt = [(7 * turn + each) % 4000 + 10 for each in range(tokens)]
            header, payload = encoded_request(name, prompt, "", Tier.STANDARD, params)
            time.sleep(options.pause_s)
            watch.steps.clear()
            ear.heard_ns.clear()
            began = time.monotonic_ns()
            member.place(Place(header, 1, binding, payload), binding)
            while member.has_work:
                member.lead_step(1)
            rows.append((tokens, began, *watch.steps[0], ear.heard_ns[0]))
    return rows


def profiled(work: Any, path: Path) -> Any:
    """Run under cProfile and leave its tables in a file."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    path.write_text(table_of(profile))
    return result


def follow_rounds(member: Any, binding: Binding, watch: Stopwatch, out: Path, rank: int) -> Any:
    """Follow until the leader leaves, twice: timed, and under cProfile."""
    from worker.step_queue import LeaveGroup

    def round_() -> None:
        while not isinstance(member.follow(binding), LeaveGroup):
            pass

    round_()
    steps = list(watch.steps)
    profiled(round_, out / f"rank-{rank}.txt")
    return steps


def serve(config: Config, base: Any, rank: Rank, options: Any) -> None:
    """Build one rank and do its part."""
    from worker.member import Member
    from worker.rank_process import build_engine
    from worker.step_queue import Begin, LeaveGroup

    engine = build_engine(config, base, rank)
    ear = Ear()
    member = Member(engine, 1, ear)  # type: ignore[arg-type]
    watch = Stopwatch(member)
    group = Group(tuple(Rank(each) for each in range(config.cell.ranks)), Mode.TP)
    binding = Binding(group, BORN)
    member.join(binding)
    if rank == group.leader:
        pages = engine.kv.num_pages - 1
        member.lead(Begin(BORN, (), pages))
        member.begin(pages, (), -1)
        result = serve_prompts(member, binding, watch, ear, "timed", options)
        member.lead(LeaveGroup(BORN, None))
        profiled(
            lambda: serve_prompts(member, binding, watch, ear, "profiled", options),
            options.out / f"rank-{rank}.txt",
        )
        member.lead(LeaveGroup(BORN, None))
    else:
        result = follow_rounds(member, binding, watch, options.out, rank)
    (options.out / f"rank-{rank}.json").write_text(json.dumps(result))
    engine.communicators.of_width(group.width).group.barrier()


def summary(folder: Path, ranks: int) -> dict[str, Any]:
    """Medians in milliseconds after the leader began, by prompt tokens."""
    leader = json.loads((folder / "rank-0.json").read_text())
    followers = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(1, ranks)]
    table: dict[str, Any] = {}
    for tokens in sorted({row[0] for row in leader}):
        rows = [row for row in leader if row[0] == tokens][2:]
        pairs = {"launch_begins": 2, "launched": 3, "token": 4}
        found = {
            name: statistics.median((row[at] - row[1]) / 1e6 for row in rows)
            for name, at in pairs.items()
        }
        for number, steps in enumerate(followers, 1):
            first = [
                next(step for step in steps if step[0] > row[1] and step[1] > row[1])
                for row in rows
            ]
            for name, at in (("begins", 0), ("launched", 1)):
                found[f"follower_{number}_{name}"] = statistics.median(
                    (step[at] - row[1]) / 1e6 for step, row in zip(first, rows, strict=True)
                )
        table[str(tokens)] = {name: round(value, 3) for name, value in found.items()}
    return table


async def in_cell(model: Path, arguments: list[str], options: argparse.Namespace) -> Any:
    """TTFT in dp and tp of a cell with profiled ranks."""
    from tests.bench.gpu_cell import running_cell

    start = BareCell.start

    def profiled_start(cell: BareCell, name: str) -> None:
        start(cell, "tests.bench.profiled_worker" if name == "worker" else name)

    BareCell.start = profiled_start  # type: ignore[method-assign, assignment]
    os.environ["PROFILE_OUT"] = str(options.out.absolute())
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="cell-"))
    up = running_cell(
        folder,
        ranks=options.ranks,
        model=model,
        device=options.device,
        engine_args=arguments,
    )
    async with up as cell:
        for layout in (f"{mode}{options.ranks}" for mode in options.modes):
            await cell.switch(layout)
            for tokens in options.tokens:
                sizes = {"tokens": tokens, "repeats": TURNS, "vocab": 4000}
                answer = await cell.measure("ttft", False, 60.0, **sizes)
                found[f"{layout} {tokens}"] = answer["values_ms"]
                print(layout, tokens, answer, flush=True)
        if options.streams:
            found["switches"] = await switched(cell, options)
    return found


async def switched(cell: Any, options: argparse.Namespace) -> Any:
    """Records of pause switches under streams."""
    streams = []
    for layout in ("tp", "dp"):
        await cell.switch(f"{layout}{options.ranks}", "pause")
        requests = {
            f"{layout}-{each}": cell.client.prepare(f"{layout}-{each}", list(range(10, 138)), 600)
            for each in range(options.streams)
        }
        streams.append(asyncio.create_task(cell.client.finish(requests)))
        await asyncio.sleep(1.0)
    for turn in range(SWITCHES):
        await cell.switch(f"{('tp', 'dp')[turn % 2]}{options.ranks}", "pause")
        await asyncio.sleep(0.15)
    records = await cell.switches(SWITCHES)
    for each in streams:
        each.cancel()
    await cell.client.clear()
    for record in records:
        print({name: value for name, value in record.items() if value}, flush=True)
    return records


def main() -> int:
    """Start all ranks and wait for them."""
    from worker.vllm_config import replica_config

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3-70b-fp8-short")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512], help="of a prompt")
    parser.add_argument("--pause-s", type=float, default=0.05, help="between two prompts")
    parser.add_argument(
        "--streams", type=int, default=64, help="of each layout, under switches in a cell"
    )
    parser.add_argument("--modes", nargs="+", default=["dp", "tp"], help="in a cell")
    parser.add_argument("--cell", action="store_true", help="a whole cell")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="profile-"))
    arguments = engine_options(options.shape, options.device, 0.6)
    if options.device == "cuda":
        arguments["compilation_config"] = COMPILATION
    if options.cell:
        model = write_shape(options.shape, folder)
        found = asyncio.run(in_cell(model, as_arguments(arguments), options))
        (options.out / "cell.json").write_text(json.dumps(found, indent=1))
        return 0
    config = check_config(
        {
            "model": {
                "path": str(write_shape(options.shape, folder)),
                "served_name": options.shape,
                "engine_args": as_arguments(arguments),
            },
            "cell": {
                "ranks": options.ranks,
                "device": options.device,
                "layout": f"dp{options.ranks}",
                "widths": [1, options.ranks],
                "dist_port": free_port(),
            },
            "run_dir": str(folder),
        }
    )
    base = replica_config(config)
    pids = [
        fork_rank(Rank(r), functools.partial(serve, config, base, Rank(r), options))
        for r in range(options.ranks)
    ]
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if os.waitstatus_to_exitcode(status):
            for each in pids:
                os.kill(each, signal.SIGKILL)
            return 1
    table = summary(options.out, options.ranks)
    (options.out / "steps.json").write_text(json.dumps(table, indent=1))
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
