"""`python -m tests.bench.fleet_limits`: how much of a fleet's work each single component can do.

One process and one core each, without network, so these are upper bounds of what a component can
take part in: placing a request over N cells, a coordinator's messages and task pool, a gateway's
relay for pushed tokens, by their own time on a core; and a real Redis as the registry of N cells,
by the clock. Prints a Markdown table. What whole requests cost a gateway, HTTP and all, is what
`tests.bench.overhead` measures.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from comm_pool.layout import Rank
from coordinator.model.settings import PoolLimits, QueueBounds
from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import CellLoad, CellState, Submit
from coordinator.protocol.messages.rank import Place, TokenBatch, TokenSpan
from coordinator.protocol.messages.tasks import TaskEnded, TaskHeader
from coordinator.protocol.prefixes import BLOCK_TOKENS, prefix_hashes
from coordinator.protocol.registry import RedisRegistry
from coordinator.protocol.terms import EndCause, TaskId, Tier
from coordinator.tasks.task_pool import TaskPool
from gateway.fleet.placement import Needs
from gateway.fleet.roster import CellRoster
from tests.harness.coordinator.pools import group
from tests.harness.redis.redis_server import Redis

ROUNDS = 5
CELLS = (1, 10, 100, 1_000)
STREAMS = 256
"""Streams that one push of a leader has tokens for."""
PROMPT_TOKENS = 2_048


def per_second(count: int, work: Callable[[], None]) -> float:
    """Return how many of `count` things a second of a core does, the median of several rounds."""
    rates = []
    for _ in range(ROUNDS):
        # The process' own time: what else the machine does is not the component's.
        began_s = time.process_time()
        work()
        rates.append(count / (time.process_time() - began_s))
    return statistics.median(rates)


def fleet(cells: int, hashes: Sequence[int]) -> CellRoster:
    """A gateway's roster of cells, all half busy, one of which knows the prompt."""
    roster = CellRoster([f"cell-{number}:8002" for number in range(cells)], 2.0, in_fleet=True)
    load = CellLoad((0, 0, 0), 32, 64, 500, 1_000)
    for name in roster:
        roster.opened(name)
        roster.update(name, CellState("dp8", 1, True, 8, 8, 0, 32_768, load=load))
    roster.sent("cell-0:8002", hashes)
    return roster


def placements(cells: int) -> float:
    """Requests that one gateway places over so many cells."""
    prompt = list(range(PROMPT_TOKENS))
    roster = fleet(cells, prefix_hashes(prompt))
    count = max(20_000 // cells, 20)

    def work() -> None:
        for number in range(count):
            needs = Needs(TaskId(f"task-{number}"), Tier.STANDARD, PROMPT_TOKENS + 512)
            roster.choose(needs, prefix_hashes(prompt))

    return per_second(count, work)


def load_messages(cells: int) -> float:
    """Messages of cells about their load that a gateway reads."""
    roster = fleet(cells, ())
    states = [
        (name, CellState("dp8", 1, True, 8, 8, queued, 32_768, load=CellLoad((0,), 32, 64, 5, 9)))
        for queued in range(9)
        for name in roster
    ]
    raw = [(name, wire.encode(state)) for name, state in states]

    def work() -> None:
        for name, each in raw:
            message = wire.decode_gateway_down(each)
            assert isinstance(message, CellState)
            roster.update(name, message)

    return per_second(len(raw), work)


def coordinator_tasks() -> float:
    """Tasks from submission to end: messages read and written, and the task pool."""
    count, payload = 2_000, bytes(2_048 * 4)
    submits = [
        wire.encode(
            Submit(
                TaskHeader(TaskId(f"task-{number}"), "gateway", "tcp://here", 2_048, 512),
                payload,
                prefixes=tuple(range(PROMPT_TOKENS // BLOCK_TOKENS)),
            )
        )
        for number in range(count)
    ]

    def work() -> None:
        pool = TaskPool(PoolLimits(QueueBounds(count), 30_000, 2_000, 5_000))
        pool.recovered(0)
        groups = [group(blocks=1_000_000, max_tasks=256)]
        for raw in submits:
            message = wire.decode_gateway_up(raw)
            assert isinstance(message, Submit)
            pool.submit(message, 0)
            for effect in pool.place(groups, 0):
                place = effect.message  # type: ignore[union-attr]
                assert isinstance(place, Place)
                wire.encode(place)
                task = place.header.task
                pool.ended(Rank(0), TaskEnded(task, place.attempt, EndCause.FINISHED, 512))
                pool.release(task, is_done=True)

    return per_second(count, work)


def relay_tokens() -> float:
    """Tokens of `STREAMS` streams that one gateway's relay puts in order and hands on."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackEncoder

    from gateway.engine.wire import AddRequest
    from gateway.relay.relay import Relay

    steps = 100

    class Nowhere:
        def send(self, message: object, cell: str) -> None:
            """What the coordinator is told costs it, not the relay."""

    def pushes() -> list[list[bytes]]:
        out = []
        for step in range(steps):
            names = [TaskId(f"task-{number}") for number in range(STREAMS)]
            spans = tuple(TokenSpan(name, 1, step, 1, False) for name in names)
            outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(name, [step]) for name in names])
            header = wire.encode(TokenBatch(Rank(0), 1, 1, spans))
            out.append([header, *map(bytes, MsgpackEncoder().encode(outputs))])
        return out

    frames = pushes()

    def work() -> None:
        relay = Relay(Nowhere(), lambda _: None, gateway="gateway", reply_to="tcp://here")
        relay.session_opened()
        for number in range(STREAMS):
            request = AddRequest(f"task-{number}", 9, 512, 1, "", 0, "", (b"",))
            relay.on_front_end_message(request)
        for each in frames:
            relay.on_tokens(each)

    return per_second(steps * STREAMS, work)


async def redis_operations(url: str, cells: int) -> tuple[float, float]:
    """Announcements a second, and looks at all cells a second, of one connection."""
    registry = RedisRegistry(url, f"model-{cells}", 600_000)
    rates: tuple[list[float], list[float]] = ([], [])
    looks = max(500 // cells, 10)
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for number in range(cells):
            await registry.announce(f"cell-{number}", f"cell-{number}.cells.llm.svc:8002")
        rates[0].append(cells / (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        for _ in range(looks):
            assert len(await registry.cells()) == cells
        rates[1].append(looks / (time.perf_counter() - began_s))
    await registry.close()
    return statistics.median(rates[0]), statistics.median(rates[1])


def main() -> None:
    """Measure and print."""
    rows = [
        (
            f"gateway: requests placed over {n:,} cells, a prompt of 2,048 tokens hashed",
            placements(n),
        )
        for n in CELLS
    ]
    rows.append(("coordinator: tasks read, pooled, placed, written, ended", coordinator_tasks()))
    rows.append(("gateway: messages about the load of 1,000 cells", load_messages(1_000)))
    rows.append((f"gateway: tokens through the relay, {STREAMS} streams a push", relay_tokens()))
    redis = Redis()
    try:
        for n in CELLS[1:]:
            announced, looked = asyncio.run(redis_operations(redis.url, n))
            rows.append((f"Redis: announcements, {n:,} cells", announced))
            rows.append((f"Redis: looks at {n:,} cells", looked))
    finally:
        redis.stop()
    print("| component, one process | a second |\n|---|---|")
    for name, rate in rows:
        print(f"| {name} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
