"""The main loop of a rank: feeds its core with events and does what the core asks for.

One thread owns the core and the sockets to gateways; the session's thread only exchanges messages
with it. Safe points lie between two passes. Nothing is decided here.
"""

import queue
from collections.abc import Callable
from typing import assert_never

from comm_pool.formations import PeerLostError
from coordinator.protocol.messages.rank import Directive, Drop
from coordinator.protocol.switch_actions import Join, Leave, Reshard, Resolve, Serve
from worker.io.session import Inbox, RankSession
from worker.rank.core import RankCore
from worker.rank.engine import NoRoomError
from worker.rank.events import (
    CopiedEarly,
    CopiesDone,
    CopyEarly,
    DeferStep,
    DetachedStepEnded,
    Done,
    DrainQueues,
    Effect,
    EndPreCopy,
    Event,
    FinishStep,
    Follow,
    ForgetSteps,
    LeadStep,
    Obey,
    Overtaken,
    Prepare,
    Prepared,
    Probe,
    Publish,
    QueueRead,
    QueuesDrained,
    Result,
    SendHello,
    SendReport,
    StepFailed,
    StepFinished,
    Tick,
    Wait,
)
from worker.rank.migration.copy_rounds import OvertakenError

DONE = Done()
NOTHING_READ = QueueRead(None)
TICK = Tick()

STEPPING = LeadStep, Follow, Reshard
"""Effects after which results of earlier ones may be there."""


class RankLoop:
    """Runs one incarnation of one rank until it is stopped."""

    def __init__(
        self,
        core: RankCore,
        session: RankSession,
        inbox: Inbox,
        watch_links: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self._runtime = core.runtime
        self._now_ns = core.runtime.host.now_ns
        self._session = session
        self._inbox = inbox
        self._watch_links = watch_links
        self.passes = 0  # Grows while the loop makes progress; the watchdog reads it.

    def run(self) -> None:
        """Loop until the core has a reason to stop."""
        self._session.start()
        while self.core.stop_reason is None:
            self.turn()
        self._runtime.steps.run_deferred()  # The other members wait in it.

    def turn(self) -> None:
        """Make one pass."""
        # A loop in an aborted formation makes no progress.
        self.passes += not self.core.is_in_aborted_formation
        self._look()
        self._take_inbox()
        self._feed(TICK)
        self._watch_links()

    def _feed(self, event: Event) -> None:
        """Let the core handle an event, and do all that follows from it."""
        handle = self.core.handle
        effect = handle(event, self._now_ns())
        while effect is not None:
            effect = handle(self._result_of(effect), self._now_ns())

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._feed(self._inbox.get())

    def _look(self) -> None:
        """Collect results of a detached step and of finished copies, as soon as they are there."""
        runtime = self._runtime
        runtime.look()
        if (copied := runtime.migration.take_copied()) is not None:
            self._feed(CopiesDone(*copied))
        if (ended_ns := runtime.steps.take_detached_end_ns()) is not None:
            self._feed(DetachedStepEnded(ended_ns))

    def _result_of(self, effect: Effect) -> Result:
        try:
            result = self._do(effect)
        except (PeerLostError, NoRoomError) as error:
            return StepFailed(error)
        if isinstance(effect, STEPPING) and result is not NOTHING_READ:
            self._look()  # Outside of the step: an error of a detached step ends the process.
        return result

    def _do(self, effect: Effect) -> Result:
        runtime = self._runtime
        match effect:
            case LeadStep(epoch=epoch):
                return StepFinished(runtime.lead_step(epoch))
            case Follow(binding=binding, wait_s=wait_s):
                message = runtime.follow(binding, wait_s=wait_s)
                return QueueRead(message) if message is not None else NOTHING_READ
            case DrainQueues():
                return QueuesDrained(tuple(runtime.drain_queues()))
            case Prepare(wanted=wanted):
                return Prepared(runtime.migration.prepare(wanted))
            case CopyEarly(directive=directive):
                return CopiedEarly(runtime.copy_early(directive))
            case EndPreCopy():
                runtime.migration.precopy.end()
            case Reshard(directive=directive):
                return self._move(directive)
            case SendReport() | SendHello() | Wait():
                self._exchange(effect)
            case Leave() | Join() | Serve() | Resolve() | Publish():
                self._switch(effect)
            case _:
                self._change_step(effect)
        return DONE

    def _exchange(self, effect: SendReport | SendHello | Wait) -> None:
        match effect:
            case SendReport(report=report):
                self._session.publish(report)
            case SendHello(hello=hello):
                self._session.hello(hello)
            case Wait(seconds=seconds):
                self._await_item(seconds)
            case _:
                assert_never(effect)

    def _switch(self, effect: Leave | Join | Serve | Resolve | Publish) -> None:
        runtime = self._runtime
        match effect:
            case Leave():
                runtime.leave(effect, self.core.participant.joined)
            case Publish(epoch=epoch, drafted=drafted):
                runtime.migration.publish(epoch, drafted)
            case Join(binding=binding):
                runtime.join(binding)
            case Serve(binding=binding, grant_pages=pages, retention=retention):
                runtime.serve(binding, retention.indices if retention is not None else (), pages)
            case Resolve():
                runtime.migration.resolve(effect)
            case _:
                assert_never(effect)

    def _change_step(self, effect: DeferStep | FinishStep | ForgetSteps | Obey | Probe) -> None:
        runtime = self._runtime
        match effect:
            case DeferStep(epoch=epoch):
                runtime.defer_step(epoch)
            case FinishStep():
                runtime.steps.finish_inflight()
            case ForgetSteps(binding=binding):
                runtime.forget_steps(binding)
            case Obey(command=Drop(task=task, attempt=attempt)):
                runtime.drop(task, attempt)
            case Obey(command=command):
                runtime.give_back(command.task)
            case Probe(binding=binding, directive=directive):
                self.core.probing.run(runtime, binding, directive)
            case _:
                assert_never(effect)

    def _move(self, directive: Directive) -> Result:
        def is_overtaken() -> bool:
            self._take_inbox()
            return self.core.is_overtaken(directive)

        try:
            self._runtime.migration.move(directive, is_overtaken)
        except OvertakenError:
            return Overtaken()
        return DONE

    def _await_item(self, seconds: float) -> None:
        try:
            item = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        self._feed(item)
