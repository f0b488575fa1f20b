"""Messages between a rank and the coordinator, as frozen msgspec structs. Pure.

A rank's reports give its present state; the coordinator's directives give the wanted one. Both are
level-triggered: repeated, lost and late ones are harmless, and later epochs win. Only task commands
and task events are edges; the `Hello` of a new session repairs lost edges. Times are integer
milliseconds of the sender's monotonic clock.
"""

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.steps import ServedSteps, WidthTimes
from coordinator.protocol.messages.tasks import (
    Adopted,
    HeldTask,
    TaskEnded,
    TaskHeader,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.terms import (
    Binding,
    Carry,
    Stage,
    Target,
    TaskId,
)


class RankHello(Message, frozen=True):
    """First message of a rank's session.

    `incarnation` grows with each restart of the rank's process. `max_tasks` is how many tasks a
    group led by this rank holds at most. `tokens_per_slot` is b of the page geometry. Ranks with
    the same `cohort` share communicators and KV; a new process may join an old cohort.
    """

    version: int
    rank: Rank
    incarnation: int
    pid: int
    device: str
    widths: tuple[int, ...]
    max_tasks: int
    max_model_len_tokens: int
    tokens_per_slot: int
    kv_heads: int
    pages_total: int
    held: tuple[HeldTask, ...]
    adopted: tuple[Adopted, ...] = ()
    """Tasks that the rank continues if the migration of `adopted_in` is committed; still
    undecided."""
    adopted_in: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    """(what, bytes) pairs: weights, views, kv, each communicator."""
    step_times: tuple[WidthTimes, ...] = ()
    tokens_per_step_max: int = 0
    """Tokens that a step computes at most; 0 is unknown."""
    cohort: int = 0
    leases: tuple[tuple[Rank, ...], ...] = ()
    """The keys of leases in which it holds pages; it may have given up those of a lost member."""
    part: int = 0
    """The part of the weights that the rank holds, of `parts`."""
    parts: int = 1
    borrow: str = "none"
    """The layers that are in parts, which it borrows: none, ffn or all."""
    whole_layers: int = 0
    """The number of layers whose feed-forward part it holds whole."""
    inherits: bool = False
    """Whether the rank alone may hit what the process before it had cached, once it serves."""


class LeaseRetention(msgspec.Struct, frozen=True):
    """The lease indices that paused tasks of an unbound group still need, as its leader reports.

    Level-triggered: the highest (`formation`, `version`) wins; members free every other page of
    that lease. `ranks` is the lease's key (`Group.lease_key`). `formation` is the one that the
    leader last joined with this key: indices retained from an earlier formation say nothing about
    pages leased since.
    """

    ranks: tuple[Rank, ...]
    version: int
    indices: tuple[int, ...]
    formation: int = 0


class LinkCut(msgspec.Struct, frozen=True):
    """A recently broken link from a rank to a gateway: its last tokens may be lost.

    `number` counts the breaks of all links of the rank's process, so that each is handled once.
    While `is_open` (the circuit breaker is open), no task may be placed whose tokens take this
    link.
    """

    reply_to: str
    number: int
    is_open: bool


class PageReport(msgspec.Struct, frozen=True):
    """Page accounting of one rank, in pages."""

    total: int
    free: int
    owned: int
    leased: int


class SwitchTimes(msgspec.Struct, frozen=True):
    """One rank's measurements of one switch, in microseconds; 0 where it took no part.

    `old_end_us` and `new_start_us` are points on the host's monotonic clock, which its ranks share:
    the end of the rank's last old step, if it had work when asked to switch, and the start of its
    first new step, if it had work at once.
    """

    epoch: int
    park_us: int = 0
    swap_us: int = 0
    first_step_us: int = 0
    old_end_us: int = 0
    new_start_us: int = 0
    reshard_us: int = 0
    reshard_bytes: int = 0
    """KV bytes that this rank pulled from other ranks."""


class Probed(msgspec.Struct, frozen=True):
    """The drift of a group's mode from its first result, or in epoch 0, at start, from dp.

    `mode` is one that computes steps, such as `tp2`; errors are in nats per token.
    """

    ranks: tuple[Rank, ...]
    mode: str
    epoch: int
    error_nats: float
    error_max_nats: float
    took_us: int = 0

    @property
    def has_drifted(self) -> bool:
        """The mode computes something else."""
        return not self.error_nats <= self.error_max_nats


class PreCopyProgress(msgspec.Struct, frozen=True):
    """What a rank has copied for the switch of `epoch` while its group served.

    `round` is the last round that it has finished, `bytes` are those of KV that it pulled from
    other ranks in all rounds.
    """

    epoch: int
    round: int = 0
    bytes: int = 0


class Report(Message, frozen=True):
    """State of a rank, sent at intervals and on every change.

    `stage` is the highest stage that this rank has acknowledged, and `target` the layout of that
    stage; `binding` is the group that it is joined to. `running`, `waiting` and `paused` count
    tasks of the group it leads. Leaders fill `retentions` for unbound groups. If the migration of
    this epoch is committed, the rank continues the `adopted` tasks and has
    `free_pages_after_commit` free pages; `has_failed` means that it could not copy its share.
    `moved` is the last committed migration that this rank has heard of, in a directive of epoch
    `heard_in_epoch`, whether it has acted on it or not.
    """

    rank: Rank
    incarnation: int
    sent_at_ms: int
    stage: Stage
    binding: Binding | None
    target: Target | None
    pages: PageReport
    running: int = 0
    waiting: int = 0
    paused: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    retentions: tuple[LeaseRetention, ...] = ()
    ended: tuple[TaskEnded, ...] = ()
    returned: tuple[TaskReturned, ...] = ()
    progress: tuple[TaskProgress, ...] = ()
    times: tuple[SwitchTimes, ...] = ()
    gauges: tuple[tuple[str, int], ...] = ()
    """Gauges that reveal leaks: rss_bytes, open_files, threads, process_groups, steps, …"""
    adopted: tuple[Adopted, ...] = ()
    cached: tuple[int, ...] = ()
    """Hashes of prompt blocks that a committed migration brought into this rank's next group."""
    has_failed: bool = False
    moved: int = 0
    heard_in_epoch: int = 0
    served: tuple[ServedSteps, ...] = ()
    """How long the led group's steps took since the last report; leaders fill it."""
    links: tuple[LinkCut, ...] = ()
    """Broken links to gateways; a link that is not named is intact."""
    probed: tuple[Probed, ...] = ()
    """The newest probe of each mode that this rank leads."""
    closed: tuple[tuple[Rank, ...], ...] = ()
    """Groups that this process can never form again: it aborted a formation of theirs."""
    free_pages_after_commit: int = 0
    oom_formation: int = 0
    """The formation in which a step of this rank ran out of device memory; 0 is none. It is
    reported until the rank serves in another one."""
    precopy: PreCopyProgress | None = None
    urgent_waiting: int = 0
    """How many of the `waiting` tasks are urgent: interactive or standard."""


class Grant(msgspec.Struct, frozen=True):
    """Pages that every member of a group leases to it (for dp: owns) when it is bound."""

    ranks: tuple[Rank, ...]
    pages: int


class PreCopyOrder(msgspec.Struct, frozen=True):
    """Copy full blocks of running tasks to where the target wants them, while groups serve.

    In this round the leader of each old group may keep the granted pages of its lease from tasks.
    In the last round, which `drafts`, ranks copy nothing: they draft the plan of the switch.
    """

    round: int
    grants: tuple[Grant, ...]
    drafts: bool = False


class Directive(Message, frozen=True):
    """The wanted state of a rank.

    `answers_ms` echoes `Report.sent_at_ms`; the rank's time lease runs `lease_ms` from there.
    `members` gives the incarnation of each rank of the target. `ended` are the ranks whose last
    process has begun to end and has no known successor. `abandoned_formation` is the formation
    that this rank reports as joined, if its leader is not joined to it and will not lead it: a
    follower need not wait for the leave message. SERVE fills `grants`. `retentions` lists the lease
    indices of unbound groups that members retain. `movers` are the parked ranks that copy KV in
    MOVE. `moved` is the last committed migration that this rank can have taken part in: if it took
    part in another one and reads a later stage, that one was not committed. While PARK has a
    `precopy` order, groups that are not in the target serve. After that `drafted` is the round that
    drafted the plan, if all ranks that change their group have read all manifests of it, else 0.
    """

    incarnation: int
    answers_ms: int
    lease_ms: int
    stage: Stage
    target: Target
    carry: Carry
    members: tuple[tuple[Rank, int], ...]
    ended: tuple[Rank, ...] = ()
    abandoned_formation: int = 0
    grants: tuple[Grant, ...] = ()
    retentions: tuple[LeaseRetention, ...] = ()
    movers: tuple[Rank, ...] = ()
    moved: int = 0
    precopy: PreCopyOrder | None = None
    drafted: int = 0


class Place(Message, frozen=True):
    """Run this task in the group formed as `binding`, after its `generated_tokens` so far."""

    header: TaskHeader
    attempt: int
    binding: Binding
    payload: bytes
    generated_tokens: tuple[int, ...] = ()
    waited_ms: int = 0
    """How long ago the task entered the pool."""
    is_promoted: bool = False
    """It is a batch task that was placed for its age, so it makes room for none."""


class Drop(Message, frozen=True):
    """Forget this task up to this attempt and free all it holds; a later one may migrate in."""

    task: TaskId
    attempt: int


class GiveBack(Message, frozen=True):
    """Free this task's KV and return it (`ReturnCause.RECOMPUTE`): its pause exceeded the limit."""

    task: TaskId


class Stop(Message, frozen=True):
    """End the process: finish no task and free everything."""

    reason: str


RankUp = RankHello | Report
RankDown = Directive | Place | Drop | GiveBack | Stop


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one task in one batch: indices first .. first+count-1 of its output."""

    task: TaskId
    attempt: int
    first: int
    count: int
    finished: bool
    waited_ms: int = 0
    """Sent with the first token: how long the task waited in the pool."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """Header of one push from a leader; vLLM's encoded `EngineCoreOutputs` follow as frames.

    `spans[i]` describes `outputs[i]` of the payload.
    """

    rank: Rank
    incarnation: int
    epoch: int
    spans: tuple[TokenSpan, ...]
