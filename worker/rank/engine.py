"""What a rank needs from its engine, in the product's own types.

`worker.engine` has these attributes and methods over vLLM. Its classes match by structure, so no
adapter stands between a rank and its engine in a step. The rank's logic imports neither torch nor
vLLM: it runs as well over an engine that computes nothing. All calls come from the rank's main
loop, except `copy_aside`, `start` and `mark`, which its copy thread calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from comm_pool.layout import Group, Rank, StepMode
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.terms import TaskId
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.pages import PagePool
from kvadaptor.slot_table import SlotTable
from kvadaptor.transfer.mailbox import RankMailbox
from kvadaptor.transfer.rounds import Finish, Round
from worker.io.step_queue import BroadcastQueue
from worker.rank.step_log import PlannedStep
from worker.rank.step_times import StepTimes
from worker.rank.task_state import Blocks, CachedChain, RunningState, StateChange
from worker.spec import RankSpec

Tokens = npt.NDArray[np.int32]
"""Token ids, (n,)."""

LeaseIndices = npt.NDArray[np.int64]
"""Lease indices of a group; in dp page numbers of the rank's own."""

ProbeResults = Mapping[tuple[int, StepMode], tuple[tuple[float, ...], int]]
"""(width, mode) -> log-probabilities in nats, and the microseconds that the probe took."""


class NoRoomError(RuntimeError):
    """The device ran out of memory in a step; the results of its launched part are void.

    The engine raises before it launches the work that needs the memory, so device and process stay
    intact.
    """


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a rank reports of its engine when a session begins."""

    device: str
    max_tasks: int
    """Maximum running tasks of a group."""
    max_model_len_tokens: int
    tokens_per_step_max: int
    memory: tuple[tuple[str, int], ...]
    """(what, bytes)."""
    step_times: tuple[WidthTimes, ...]
    """The start-up measurements, by width."""
    whole_layers: int | None
    """The number of whole layers that the engine took; None if it borrows nothing."""
    inherits: bool = False
    """Whether the rank alone may hit blocks of the process before it, once it serves."""


# ------------------------------------------------------------------------------ steps


class Plan(PlannedStep, Protocol):
    """One scheduled step. Only the engine that made it, and its peers' engines, look inside."""

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing; it then lists ended tasks for the followers."""

    @property
    def is_void(self) -> bool:
        """Whether it computes, copies and lists nothing: nobody has to know of it."""

    @property
    def reads_prompts(self) -> bool:
        """Whether some task computes more than its last token, so its first one may come out."""


class TaskOutput(Protocol):
    """What a step gave one task, for its client."""

    @property
    def request_id(self) -> TaskId:
        """The task."""

    @property
    def new_token_ids(self) -> Sequence[int]:
        """The tokens of this step."""

    @property
    def finished(self) -> bool:
        """Whether these are the task's last."""


class Continuation(Protocol):
    """A request that continues where another group left its task."""

    def token_ids(self) -> Tokens:
        """Return all token ids, the prompt's first."""

    def catch_up(self, state: RunningState) -> None:
        """Bring it to a later state of the attempt of which it was made."""

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append the tokens of the step that was in flight at its publication."""


class Intake(Protocol):
    """Makes requests of gateways' payloads; schedulers take them."""

    def request(self, payload: bytes) -> Any:
        """Build a fresh request; raises any error that the engine finds in it."""

    def continued_request(self, payload: bytes, state: RunningState) -> Continuation:
        """Build a request that continues from this state, with its block hashes."""


class EngineScheduler(Protocol):
    """The tasks and blocks of one mode, on the rank that leads its group.

    Tasks stay here while the mode is parked. Lists of tasks are of their names.
    """

    @property
    def requests(self) -> Mapping[str, object]:
        """All tasks, by name."""

    @property
    def idle(self) -> bool:
        """Whether there is no task."""

    @property
    def is_full(self) -> bool:
        """Whether the engine may lack room for one more task."""

    @property
    def reads_no_prompt(self) -> bool:
        """Whether the next step computes just the last token of each running task."""

    @property
    def may_be_void(self) -> bool:
        """Whether a step in flight loads what may turn out to be void, so that none may follow."""

    @property
    def has_more(self) -> bool:
        """Whether there is a step to plan while others are in flight: in pipeline groups."""

    @property
    def passes_tokens(self) -> bool:
        """Whether devices pass sampled tokens on: a task may be in two steps in flight."""

    @property
    def frees_after_step(self) -> bool:
        """Whether the end of the in-flight step frees blocks."""

    @property
    def blocks_free(self) -> int:
        """Granted blocks that no task uses."""

    @property
    def blocks_total(self) -> int:
        """Granted blocks."""

    def has_requests(self) -> bool:
        """Return whether there is a step to plan, perhaps an empty one."""

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting tasks."""

    # -- pages

    def grant(self, indices: LeaseIndices) -> None:
        """Make exactly the blocks of these lease indices allocatable."""

    def withdraw(self) -> LeaseIndices:
        """Park; return the lease indices that the remaining tasks still hold."""

    def set_aside(self, pages: int) -> LeaseIndices:
        """Keep this many lease indices from tasks, or as many as are free; return all of them.

        Their blocks have whole pages on every member. The next `grant` ends that, too.
        """

    def give_back(self) -> None:
        """Let tasks have all that is set aside."""

    def look_ahead(self, tokens: int) -> None:
        """In steps from now on give each task blocks for this many tokens more, if many are free.

        0 ends that, and so does the next `grant`.
        """

    # -- tasks

    def add_task(self, request: Any, generated: list[int], *, is_promoted: bool = False) -> None:
        """Add a fresh request of `Intake`; earlier attempts made its `generated` tokens.

        A batch task that was placed for its age keeps its KV as tasks of other tiers do.
        """

    def holding(self) -> list[str]:
        """Return the tasks that hold KV: these can pause or migrate."""

    def not_holding(self) -> list[str]:
        """Return the tasks that hold none."""

    def not_movable(self) -> list[str]:
        """Return tasks whose KV another group could not continue with."""

    def outgrown(self) -> list[str]:
        """Return tasks whose next token needs more blocks than the group has.

        Blocks that are set aside count. A migration may bring a task to a group that has room for
        the tokens it has, and not for those to come.
        """

    def holders_of(self, indices: LeaseIndices) -> list[str]:
        """Return tasks with a block in one of these lease indices; the mode is not bound."""

    def take_back(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Remove tasks, free their blocks and return the tokens that each has generated."""

    def leave_to_others(self, request_ids: Iterable[str]) -> None:
        """Forget tasks that continue elsewhere; `tidy` frees their blocks, and so does `grant`."""

    def tidy(self, most: int | None = None) -> bool:
        """Free the rest of tasks that have gone, and finish what is put off for those adopted.

        For at most this many of either. Returns whether none is left.
        """

    # -- migration

    def movable(self, cached_blocks_max: int) -> tuple[list[RunningState], list[CachedChain]]:
        """Return what another group could continue: running tasks, and chains that can be hit."""

    def written_blocks(self) -> Blocks:
        """Return the logical blocks that the in-flight step writes, also of ended tasks."""

    def progress_since(
        self, states: Sequence[RunningState], chains: Iterable[CachedChain]
    ) -> list[StateChange | None] | None:
        """Return what each task has got since then; None in its place: it has ended.

        None for all: one has other blocks, another one could move, too, or a chain is not cached
        any more.
        """

    def tokens_since(self, counts: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the tokens after these counts of each task's; ended tasks are absent."""

    def adopt(
        self,
        tasks: Iterable[tuple[Any, Blocks]],
        chains: Sequence[CachedChain],
        granted: LeaseIndices,
        indices: LeaseIndices,
        known: Mapping[str, Tokens] | None = None,
    ) -> None:
        """Go on with continuations in their (m,) blocks, and let carried chains be hit.

        The blocks belong to the lease indices `granted`, are free and hold the KV. `chains` are
        oldest first; `indices` are those of a wide group that the migration has filled. `known` are
        the tasks' first tokens, by name: those that they had when their requests were made.
        """


class EngineMode(Protocol):
    """The prepared objects of one width on this rank."""

    @property
    def width(self) -> int:
        """The members of its groups."""

    @property
    def stages(self) -> int:
        """The pipeline stages of its groups; 1 if they are no pipeline groups."""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The members of this rank's group of that width."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules for the group."""

    @property
    def scheduler(self) -> EngineScheduler | None:
        """The group's scheduler, if this rank leads."""

    @property
    def table(self) -> SlotTable | None:
        """Where each logical block lies on this rank; None in dp."""

    @property
    def directory(self) -> GroupDirectory | None:
        """The block directory of the group; None where KV ends with its process."""

    @property
    def queue(self) -> BroadcastQueue:
        """The group's step queue; wide groups have one."""

    @property
    def times(self) -> StepTimes:
        """The step times of the start-up."""

    def plan_step(self, group: Group, settle: Callable[[], None]) -> Plan:
        """Schedule the group's next step, in the mode that suits its size; only a leader does.

        Calls `settle` if the engine needs the tokens of the in-flight step first.
        """

    def inherit(self) -> None:
        """Let tasks hit the blocks that this rank alone has from the process before it.

        The group has begun, and its pages are granted.
        """

    # Arguments named `plan` are plans of this engine or of a peer's; no other engine reads them.

    def execute(self, plan: Any) -> Any:
        """Run a step on this rank; the width must be selected. Raises `NoRoomError`.

        Returns the step's result, or a handle to wait for it; see `InflightStep`.
        """

    def ready(self, plan: Any) -> Callable[[], Any]:
        """Return a call that runs the step later; its KV stays where it is now."""

    def finish_step(self, plan: Any, result: Any) -> Sequence[TaskOutput]:
        """Update all tasks of a step; return the outputs for their clients.

        Raises if the step read the memory of a process that has ended.
        """

    def forget_steps(self) -> None:
        """Forget in-flight steps and what they gave the runner: they never finish."""


# ------------------------------------------------------------------------------ the engine


class EngineCommunicators(Protocol):
    """Which formations were aborted."""

    @property
    def closed(self) -> tuple[tuple[Rank, ...], ...]:
        """Groups that this process can never form again."""

    def is_aborted(self, ranks: tuple[Rank, ...], formation: int) -> bool:
        """Return whether this rank or another member has aborted the formation."""

    def abort(self, ranks: tuple[Rank, ...], formation: int) -> None:
        """Make the collectives of a formation raise `PeerLostError`; any thread."""


class EngineProbe(Protocol):
    """The probe of the numerical guard."""

    @property
    def error_max_nats(self) -> float:
        """The largest error that is no drift."""

    def run(self, execute: Callable[[Any], Any], mode: StepMode) -> tuple[float, ...]:
        """Compute the probe in one mode; `execute` runs a plan on all ranks of the group.

        Returns log-probabilities, in nats.
        """


class EngineMover(Protocol):
    """Copies KV between ranks, numbered from the first one that the engine can reach."""

    @property
    def is_one_sided(self) -> bool:
        """Whether a rank copies without its peers, so that copies can run beside their steps."""

    def start(
        self, copies: Round, finest: Split, launched: Callable[[], None] = lambda: None
    ) -> Finish:
        """Begin this rank's part of a round of the units that `finest` makes; see `Mover`."""


class EngineKV(Protocol):
    """The rank's KV memory."""

    @property
    def geometry(self) -> PageGeometry:
        """The shape of a page."""

    @property
    def num_pages(self) -> int:
        """All pages, including the reserved one."""


class Engine(Protocol):
    """A rank's prepared modes, its pages, and its access to the peers it exchanges tasks with."""

    @property
    def spec(self) -> RankSpec:
        """What the engine was built from."""

    @property
    def modes(self) -> Mapping[Any, EngineMode]:
        """All prepared modes."""

    @property
    def communicators(self) -> EngineCommunicators:
        """The groups' communicators."""

    @property
    def intake(self) -> Intake:
        """What makes requests."""

    @property
    def kv(self) -> EngineKV:
        """The KV memory."""

    @property
    def pages(self) -> PagePool:
        """Who has each page."""

    @property
    def mailboxes(self) -> Mapping[Rank, RankMailbox]:
        """The mailboxes of this rank and of its peers."""

    @property
    def mover(self) -> EngineMover:
        """What copies KV between ranks."""

    @property
    def probe(self) -> EngineProbe:
        """The probe."""

    @property
    def probed(self) -> ProbeResults:
        """The probe's results at start-up."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a step is over once it was launched."""

    @property
    def holds_steps(self) -> bool:
        """Whether groups are left for a migration with a deferred step, not a detached one."""

    def order_copies(self) -> None:
        """Let what is launched from now on wait for loads that go beside steps.

        A leader knows only of its own copies when it gives the blocks of a load to others.
        """

    def stop_copies(self) -> None:
        """End the copies beside steps that the group began: the rank leaves it."""

    def give_host_pages(self) -> None:
        """Give pages in host memory to ranks of the cell that have more use for them."""

    def know(self, present: Mapping[Rank, int]) -> None:
        """Take note of the processes of the cell: the incarnation of each rank."""

    def facts(self) -> EngineFacts:
        """Return what the rank reports of this engine."""

    def gauges(self) -> tuple[tuple[str, int], ...]:
        """Return the gauges in which a leak would show, and the schedulers' totals."""

    def of_width(self, width: int, stages: int = 1) -> EngineMode:
        """Return the prepared mode for groups of this width and number of pipeline stages."""

    def select(self, width: int, formation: int = 0, stages: int = 1) -> EngineMode:
        """Make steps compute in such groups, for a formation, from now on."""

    def done(self) -> Callable[[], bool]:
        """Return a query for whether the device has done all that was launched until now."""

    def mark(self) -> Callable[[], None]:
        """Return a call after which the caller's later work waits for what this thread launched."""

    def meet(self, width: int) -> None:
        """Order later launches after all that the members of this width have launched so far."""

    def copy_aside(self) -> None:
        """Let the calling thread's copies run beside in-flight steps."""
