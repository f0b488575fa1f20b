"""Messages for tests of the coordinator's pure parts, with everything that is not at issue set."""

from collections.abc import Sequence

from comm_pool.layout import Layout, Mode, Rank, parse_layout
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import (
    Directive,
    Grant,
    LeaseRetention,
    LinkCut,
    PageReport,
    PreCopyOrder,
    PreCopyProgress,
    RankHello,
    Report,
)
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.messages.tasks import (
    Adopted,
    HeldTask,
    TaskEnded,
    TaskHeader,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.terms import Binding, Carry, Phase, Stage, Target, TaskId, Tier

WIDTHS = (1, 2, 4)
LEASE_MS = 1_000


def layout(text: str, world: int = 4) -> Layout:
    return parse_layout(text, world, WIDTHS)


def target(text: str, *formation: int, world: int = 4) -> Target:
    """A target whose groups were formed in these epochs; the last one holds for the rest."""
    groups = layout(text, world).groups
    borns = [*formation, *[formation[-1]] * (len(groups) - len(formation))]
    return Target(tuple(Binding(group, b) for group, b in zip(groups, borns, strict=True)))


def directive(
    wanted: Target,
    epoch: int,
    phase: Phase,
    *,
    carry: Carry = Carry.RECOMPUTE,
    answers_ms: int = 0,
    members: dict[int, int] | None = None,
    abandoned_formation: int = 0,
    grants: Sequence[Grant] = (),
    retentions: Sequence[LeaseRetention] = (),
    incarnation: int = 1,
    moved: int = 0,
    movers: Sequence[int] | None = None,
    precopy: PreCopyOrder | None = None,
    drafted: int = 0,
    ended: Sequence[int] = (),
) -> Directive:
    """What all ranks are told; all of them move, if not told otherwise."""
    incarnations = dict.fromkeys(wanted.layout.ranks, 1) | (members or {})
    return Directive(
        incarnation=incarnation,
        answers_ms=answers_ms,
        lease_ms=LEASE_MS,
        stage=Stage(epoch, phase),
        target=wanted,
        carry=carry,
        members=tuple((Rank(rank), each) for rank, each in incarnations.items()),
        abandoned_formation=abandoned_formation,
        grants=tuple(grants),
        retentions=tuple(retentions),
        moved=moved,
        movers=tuple(map(Rank, movers)) if movers is not None else wanted.layout.ranks,
        precopy=precopy,
        drafted=drafted,
        ended=tuple(map(Rank, ended)),
    )


def hello(
    rank: int,
    incarnation: int = 1,
    *,
    held: Sequence[HeldTask] = (),
    widths: tuple[int, ...] = WIDTHS,
    max_tasks: int = 4,
    pages_total: int = 11,
    cohort: int = 0,
) -> RankHello:
    return RankHello(
        version=PROTOCOL_VERSION,
        rank=Rank(rank),
        incarnation=incarnation,
        pid=1_000 + rank,
        device="cpu",
        widths=widths,
        max_tasks=max_tasks,
        max_model_len_tokens=1_000,
        tokens_per_slot=16,
        kv_heads=8,
        pages_total=pages_total,
        held=tuple(held),
        step_times=tuple(width_times(width) for width in widths if width != 2),
        cohort=cohort,
    )


def width_times(width: int) -> WidthTimes:
    """Curves that cross at 64 tokens, of sp2tp2 at 32; ranks compute all widths but 2 in sp."""
    if width == 1:
        return WidthTimes(1, ((Mode.DP, ((1, 9_000), (512, 40_000))),))
    tp, sp = ((1, 5_000), (512, 20_000)), ((1, 7_000), (512, 12_000))
    curves = ((Mode.TP.value, tp), (Mode.SP.value, sp))
    if width != 4:
        return WidthTimes(width, curves, 64)
    mixed = ((1, 6_000), (512, 16_000))
    return WidthTimes(width, (*curves, ("sp2tp2", mixed)), 64, (("sp2tp2", 32),))


def report(
    rank: int,
    stage: Stage,
    *,
    sent_at_ms: int = 0,
    binding: Binding | None = None,
    target: Target | None = None,
    free: int = 10,
    running: int = 0,
    blocks_free: int | None = None,
    blocks_total: int = 0,
    incarnation: int = 1,
    retentions: Sequence[LeaseRetention] = (),
    ended: Sequence[TaskEnded] = (),
    returned: Sequence[TaskReturned] = (),
    progress: Sequence[TaskProgress] = (),
    adopted: Sequence[Adopted] = (),
    has_failed: bool = False,
    moved: int = 0,
    heard_in_epoch: int = 0,
    links: Sequence[LinkCut] = (),
    closed: Sequence[tuple[Rank, ...]] = (),
    free_pages_after_commit: int = 0,
    precopy: PreCopyProgress | None = None,
) -> Report:
    return Report(
        rank=Rank(rank),
        incarnation=incarnation,
        sent_at_ms=sent_at_ms,
        stage=stage,
        binding=binding,
        target=target,
        pages=PageReport(total=11, free=free, owned=10 - free, leased=0),
        running=running,
        blocks_free=blocks_total if blocks_free is None else blocks_free,
        blocks_total=blocks_total,
        retentions=tuple(retentions),
        ended=tuple(ended),
        returned=tuple(returned),
        progress=tuple(progress),
        adopted=tuple(adopted),
        has_failed=has_failed,
        moved=moved,
        heard_in_epoch=heard_in_epoch,
        links=tuple(links),
        closed=tuple(closed),
        free_pages_after_commit=free_pages_after_commit,
        precopy=precopy,
    )


def header(
    task: str,
    *,
    prompt: int = 10,
    max_tokens: int = 10,
    tier: Tier = Tier.STANDARD,
    gateway: str = "g",
    reply_to: str = "tcp://g",
    deadline_ms: int = 0,
    tenant: str = "",
) -> TaskHeader:
    sizes = (prompt, max_tokens)
    return TaskHeader(TaskId(task), gateway, reply_to, *sizes, tier, deadline_ms, tenant)


def submit(
    task: str,
    *,
    delivered: Sequence[int] = (),
    attempt: int = 0,
    prefixes: Sequence[int] = (),
    void_attempt: int = 0,
    **fields: object,
) -> Submit:
    what = (header(task, **fields), task.encode())  # type: ignore[arg-type]
    return Submit(*what, tuple(delivered), attempt, tuple(prefixes), void_attempt)
