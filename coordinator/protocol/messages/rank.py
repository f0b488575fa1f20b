"""Messages between a rank and the coordinator, as frozen msgspec structs.

Reports go from rank to coordinator and say what is; directives go back and say what should be.
Both are level-triggered: repeated, lost and late ones are harmless, later epochs win. Only task
commands and task events are edges, and a new session's `Hello` repairs lost edges.
Pure: no clock, no sockets. Times are integers of milliseconds of the sender's monotonic clock.
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

    `incarnation` grows with each restart of the rank's process. `max_tasks` is the most tasks a
    group led by this rank holds at once. `tokens_per_slot` is b of the page geometry. `cohort` is
    the same number for ranks that share communicators and KV; a new process may join an old one.
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
    """What the rank goes on with if the move of `adopted_in` is committed; it has not heard yet."""
    adopted_in: int = 0
    memory: tuple[tuple[str, int], ...] = ()
    """(what, bytes) pairs: weights, views, kv, each communicator."""
    step_times: tuple[WidthTimes, ...] = ()
    tokens_per_step_max: int = 0
    """Most tokens that a step computes; 0 is unknown."""
    cohort: int = 0
    leases: tuple[tuple[Rank, ...], ...] = ()
    """The groups whose leases it has pages in; it may have given up those of a lost member."""


class LeaseRetention(msgspec.Struct, frozen=True):
    """The lease indices that paused tasks of an unbound group still need, told by its leader.

    Level-triggered: the highest (`formation`, `version`) wins; members free every other page of
    that lease. `formation` is the formation that the leader last joined with these ranks: what was
    kept of an earlier one says nothing about pages that were leased since.
    """

    ranks: tuple[Rank, ...]
    version: int
    indices: tuple[int, ...]
    formation: int = 0


class LinkCut(msgspec.Struct, frozen=True):
    """A link from a rank to a gateway that broke not long ago: its last tokens may be lost.

    `number` counts the breaks of all links of the rank's process, so that each is acted on once.
    While the link `is_open` (a circuit, that is), no task is to be placed whose tokens it carries.
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
    """What one rank measured of one switch, in microseconds; 0 where it had no part.

    `old_end_us` and `new_start_us` are points on the host's monotonic clock, which its ranks share:
    when the rank's last old step ended, if it was at work when it was asked to switch, and when its
    first new step started, if there was work for it at once.
    """

    epoch: int
    park_us: int = 0
    swap_us: int = 0
    first_step_us: int = 0
    old_end_us: int = 0
    new_start_us: int = 0
    reshard_us: int = 0
    reshard_bytes: int = 0
    """KV bytes that this rank pulled from others."""


class Probed(msgspec.Struct, frozen=True):
    """How far a mode of a group is from where it was, or in epoch 0, at start, from dp.

    `mode` is one that steps are computed in, such as `tp2`; errors are in nats per token.
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


class Report(Message, frozen=True):
    """State of a rank, sent on an interval and on every change.

    `stage` is the highest stage this rank has acknowledged; `binding` is what it is joined to and
    `target` the layout it last acknowledged a stage of. `running`, `waiting` and `paused` count
    the tasks of the group it leads. `kept` is filled by leaders for unbound groups. `adopted` are
    the tasks that this rank goes on with if the move of this epoch is committed,
    `free_pages_after_commit` the pages that it has free then; `has_failed` says that it could not
    copy its share. `moved` is the last committed move that this rank was told of, in a directive of
    epoch `heard_in_epoch`, whether it has acted on it or not.
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
    kept: tuple[LeaseRetention, ...] = ()
    ended: tuple[TaskEnded, ...] = ()
    returned: tuple[TaskReturned, ...] = ()
    progress: tuple[TaskProgress, ...] = ()
    times: tuple[SwitchTimes, ...] = ()
    gauges: tuple[tuple[str, int], ...] = ()
    """What leaks would show in: rss_bytes, open_files, threads, process_groups, steps, …"""
    adopted: tuple[Adopted, ...] = ()
    cached: tuple[int, ...] = ()
    """Hashes of prompts' blocks that a committed move brought into this rank's next group."""
    has_failed: bool = False
    moved: int = 0
    heard_in_epoch: int = 0
    served: tuple[ServedSteps, ...] = ()
    """How long the led group's steps took since the last report; filled by leaders."""
    links: tuple[LinkCut, ...] = ()
    """Links to gateways that broke; those that are not named are fine."""
    probed: tuple[Probed, ...] = ()
    """The newest probe of each mode that this rank leads."""
    closed: tuple[tuple[Rank, ...], ...] = ()
    """Groups that this process can never form again: it got out of their collectives by force."""
    free_pages_after_commit: int = 0
    oom_formation: int = 0
    """The formation in which a step of this rank found no room on its device; 0 is none.
    It is told until the rank serves in another one."""


class Grant(msgspec.Struct, frozen=True):
    """Pages that every member of a group leases to it when it is bound (for dp: owns)."""

    ranks: tuple[Rank, ...]
    pages: int


class Directive(Message, frozen=True):
    """The wanted state of a rank.

    `answers_ms` echoes `Report.sent_at_ms`; the rank's time lease runs `lease_ms` from there.
    `members` gives the incarnation of each rank of the target. `abandoned_formation` is the
    formation that this rank is joined to, by its last report, if its leader is not joined to it and
    will not lead it: a follower need not wait for the leader's word. `grants` is filled in SERVE.
    `kept` tells members which lease indices of unbound groups remain. `movers` are the parked ranks
    that copy KV in MOVE. `moved` is the last committed move that this rank can have taken part in:
    if it took part in another one, and reads of a later stage, then that one was not committed.
    """

    incarnation: int
    answers_ms: int
    lease_ms: int
    stage: Stage
    target: Target
    carry: Carry
    members: tuple[tuple[Rank, int], ...]
    abandoned_formation: int = 0
    grants: tuple[Grant, ...] = ()
    kept: tuple[LeaseRetention, ...] = ()
    movers: tuple[Rank, ...] = ()
    moved: int = 0


class Place(Message, frozen=True):
    """Run this task in the group formed as `binding`, behind `generated_tokens` made earlier."""

    header: TaskHeader
    attempt: int
    binding: Binding
    payload: bytes
    generated_tokens: tuple[int, ...] = ()
    waited_ms: int = 0
    """How long ago the task came into the pool."""


class Drop(Message, frozen=True):
    """Forget this task, up to this attempt, and free all it holds; a later one may be moved in."""

    task: TaskId
    attempt: int


class GiveBack(Message, frozen=True):
    """Free this task's KV and return it (`ReturnCause.RECOMPUTE`): it was paused for too long."""

    task: TaskId


class Stop(Message, frozen=True):
    """Leave: finish nothing, free everything, end the process."""

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
    """With the first token: how long the task waited in the pool."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """Header of one push from a leader; vLLM's encoded `EngineCoreOutputs` follow as frames.

    `spans[i]` describes `outputs[i]` of the payload.
    """

    rank: Rank
    incarnation: int
    epoch: int
    spans: tuple[TokenSpan, ...]
