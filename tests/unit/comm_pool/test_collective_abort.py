"""How a rank gets out of CUDA collectives, against emulated kernels and an emulated NCCL."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from structlog.testing import capture_logs

from comm_pool.cuda import collective_abort, signal_kernel
from comm_pool.cuda.collective_abort import (
    CallGate,
    CollectiveAborter,
    GuardedLibrary,
    Signal,
    SignalPump,
    peers_of,
    signal_bytes,
    unblock,
    undivided,
)
from comm_pool.formations import PeerLostError
from tests.harness.faults.emulated_reduce import Gpu, let_through_in_torch, signal_type

CPU = torch.device("cpu")
PATIENCE_S = 20.0
BORN = 4


@pytest.mark.parametrize(("size", "peers"), [(4_864, 16), (2_560, 8)])
def test_known_counters_are_told_by_their_size(size: int, peers: int) -> None:
    assert peers_of(size) == peers
    assert signal_bytes(peers) == size == ctypes.sizeof(signal_type(peers))


@pytest.mark.parametrize("size", [0, 2_432, 4_992, 8_192])
def test_other_counters_are_refused(size: int) -> None:
    assert peers_of(size) is None


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_kernel, "launch", let_through_in_torch)


class Drained(threading.Thread):
    """Drains one rank until its kernels are done, as its watchdog does."""

    def __init__(self, gpu: Gpu, peers: int) -> None:
        super().__init__(daemon=True)
        self._gpu = gpu
        self._signal = Signal(gpu.words, peers)

    def run(self) -> None:
        pump = SignalPump(CPU)
        while not self._gpu.is_done(0.0):
            pump.drain([self._signal], lambda: not self._gpu.is_done(0.0))


@pytest.mark.parametrize("shows_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("peers", [8, 16])
def test_blocks_pass_one_barrier_after_the_other_with_a_dead_peer(
    peers: int, shows_late: bool
) -> None:
    """Also where a flag that was raised is not seen before the kernel has ended."""
    gpus = [Gpu(place, peers, blocks=3, shows_late=shows_late) for place in range(2)]
    gpus[0].launch(gpus, collectives=20)
    assert not gpus[0].is_done(0.1), "nobody comes out by itself"
    assert gpus[0].passed == [0, 0, 0]
    Drained(gpus[0], peers).start()
    assert gpus[0].is_done(PATIENCE_S)
    assert gpus[0].passed == [40, 40, 40]


def test_counters_that_wrap_around_are_drained_too() -> None:
    gpus = [Gpu(place, 16, blocks=2) for place in range(2)]
    for block in range(2):
        gpus[0].signal.flag[block] = 0xFFFFFFF0
    gpus[0].launch(gpus, collectives=16)
    Drained(gpus[0], 16).start()
    assert gpus[0].is_done(PATIENCE_S)
    assert gpus[0].signal.flag[0] == 16


def test_survivors_whose_counters_drift_apart_both_come_out() -> None:
    """One is drained far ahead, and writes what the other does not wait for into its counters."""
    gpus = [Gpu(place, 16, blocks=2) for place in range(3)]
    gpus[2].launch(gpus, collectives=5)
    for gpu in gpus[:2]:
        gpu.launch(gpus, collectives=25)
    assert gpus[2].is_done(PATIENCE_S), "the third is dead from here on"
    assert not gpus[0].is_done(0.05)
    assert not gpus[1].is_done(0.05)
    Drained(gpus[0], 16).start()
    assert gpus[0].is_done(PATIENCE_S)
    assert not gpus[1].is_done(0.05), "another's way out is none for this one"
    assert gpus[1].signal.start[0][0] == gpus[0].signal.flag[0] - 1, "far ahead of what is awaited"
    Drained(gpus[1], 16).start()
    assert gpus[1].is_done(PATIENCE_S)
    assert gpus[0].passed == gpus[1].passed == [50, 50]


def test_draining_ends_when_it_is_no_longer_wanted_and_after_its_time() -> None:
    gpu = Gpu(0, 16, blocks=1)
    signal, started = Signal(gpu.words, 16), time.monotonic()
    SignalPump(CPU).drain([signal], lambda: False)
    assert not gpu.words.any(), "counters of a living group are left alone"
    SignalPump(CPU).drain([signal], lambda: True)
    assert collective_abort.DRAIN_S <= time.monotonic() - started < PATIENCE_S
    assert gpu.words.any()


def test_the_log_tells_whether_blocks_pass_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they stand still, the device waits for something else."""
    monkeypatch.setattr(collective_abort, "DRAIN_S", 0.001)
    gpu = Gpu(0, 16, blocks=2)
    signal, pump, logged = Signal(gpu.words, 16), SignalPump(CPU), []

    def note(_event: str, *, flags: list[int], **_: object) -> None:
        if threading.current_thread() is threading.main_thread():  # Others still drain.
            logged.append(flags)

    monkeypatch.setattr(collective_abort, "log", SimpleNamespace(info=note))
    for flags in ([3, 4], [5, 6], [5, 6]):
        gpu.signal.flag[:2] = flags
        pump.drain([signal], lambda: True)
    assert logged == [[0], [7], [11]], "as of the end of the drain before"


# NCCL


class Nccl:
    """vLLM's wrapper of the library, in which a call may take until it is let go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.depth = 0
        self.is_inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def has_symbol(self, _name: str) -> bool:
        return True

    def ncclAllReduce(self, *args: Any) -> None:  # noqa: N802
        self.is_inside.set()
        assert self.go_on.wait(PATIENCE_S)
        self.calls.append(f"all-reduce {args}")

    def ncclGroupStart(self) -> None:  # noqa: N802
        self.depth += 1

    def ncclGroupEnd(self) -> None:  # noqa: N802
        self.depth -= 1

    def ncclCommAbort(self, communicator: str) -> None:  # noqa: N802
        self.calls.append(f"abort {communicator}")


def guarded(nccl: Nccl) -> tuple[Any, CallGate]:
    guard = CallGate(lambda: BORN)
    return GuardedLibrary(nccl, guard), guard


def test_calls_pass_until_it_is_closed_and_then_raise() -> None:
    nccl = Nccl()
    library, guard = guarded(nccl)
    library.ncclAllReduce(1, 2)
    assert guard.close(1.0)
    for _ in range(2):
        with pytest.raises(PeerLostError) as raised:
            library.ncclAllReduce(3)
    assert raised.value.formation == BORN
    assert nccl.calls == ["all-reduce (1, 2)"]
    assert library.has_symbol("x"), "what is no call of a communicator passes"
    with pytest.raises(AttributeError):
        _ = library.ncclNothing


def in_a_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_call_under_way_is_waited_for_and_not_longer_than_wanted() -> None:
    nccl = Nccl()
    library, guard = guarded(nccl)
    nccl.go_on.clear()
    caller = in_a_thread(lambda: library.ncclAllReduce(1))
    assert nccl.is_inside.wait(PATIENCE_S)
    assert not guard.close(0.05)
    nccl.go_on.set()
    assert guard.close(PATIENCE_S)
    assert nccl.calls == ["all-reduce (1,)"], "it came to its end before it was closed"
    caller.join(PATIENCE_S)


def test_a_group_of_calls_is_never_left_open() -> None:
    nccl = Nccl()
    library, guard = guarded(nccl)
    communicator = SimpleNamespace(nccl_guard=guard)
    closed: list[bool] = []
    with undivided(communicator):
        library.ncclGroupStart()
        closer = in_a_thread(lambda: closed.append(guard.close(PATIENCE_S)))
        library.ncclAllReduce(1)
        assert not closed
        library.ncclGroupEnd()
    closer.join(PATIENCE_S)
    assert (closed, nccl.depth) == ([True], 0)
    with pytest.raises(PeerLostError), undivided(communicator):
        library.ncclGroupStart()
    assert nccl.depth == 0
    with undivided(SimpleNamespace()):
        nccl.ncclGroupStart()


# A group


def group_of(nccl: Nccl | None, custom: Any = None, multicast: Any = None) -> Any:
    pynccl = SimpleNamespace(disabled=nccl is None, nccl=nccl, comm="communicator", device=CPU)
    return SimpleNamespace(
        ranks=[0, 1],
        rank_in_group=1,
        device=CPU,
        device_group=TorchGroup(),
        device_communicator=SimpleNamespace(
            pynccl_comm=pynccl,
            ca_comm=custom,
            symm_mem_comm=multicast,
            all_gather=lambda tensor, dim=-1: ("gathered", tensor, dim),
        ),
    )


class TorchGroup:
    """torch's process group, and how often it was aborted."""

    def __init__(self) -> None:
        self.aborted: list[torch.device] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(abort=lambda: self.aborted.append(device))


class SilentDrainer:
    """Tells what it is asked to drain."""

    def __init__(self) -> None:
        self.drained: list[Any] = []
        self.warmed: list[int] = []

    def warm(self, peers: int) -> None:
        self.warmed.append(peers)

    def drain(self, signals: Sequence[Any], _is_wanted: Any) -> None:
        self.drained += signals


def aborter(group: Any, pump: Any) -> CollectiveAborter:
    return CollectiveAborter(group, pump, lambda: BORN)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_group_without_custom_all_reduce_is_closed_once() -> None:
    nccl, pump = Nccl(), SilentDrainer()
    group = group_of(nccl, SimpleNamespace(disabled=True))
    way = aborter(group, pump)
    group.device_communicator.pynccl_comm.nccl.ncclAllReduce(1)
    for _ in range(3):
        unblock([way], pump, lambda: True)  # type: ignore[arg-type]
    until(lambda: len(nccl.calls) == 2)
    assert nccl.calls == ["all-reduce (1,)", "abort communicator"]
    assert not pump.drained
    with pytest.raises(PeerLostError):
        group.device_communicator.pynccl_comm.nccl.ncclAllReduce(2)


def test_where_vllm_s_binding_does_not_load_torch_s_group_is_closed() -> None:
    pump, group = SilentDrainer(), group_of(None)
    communicator = group.device_communicator
    way = aborter(group, pump)
    assert communicator.all_gather(5, dim=0) == ("gathered", 5, 0)
    for _ in range(3):
        unblock([way], pump, lambda: True)  # type: ignore[arg-type]
    until(lambda: group.device_group.aborted)
    assert group.device_group.aborted == [CPU], "once"
    with pytest.raises(PeerLostError):
        communicator.all_gather(5)
    with pytest.raises(PeerLostError), undivided(communicator):
        pass


def test_counters_of_custom_all_reduce_are_found_and_never_touched_to_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(1, 16, blocks=1)
    monkeypatch.setattr("vllm._custom_ops.meta_size", lambda: 4_864)
    monkeypatch.setattr(collective_abort, "_Words", lambda address, size: (address, size))
    found = {(77, 4_864): gpu.words}
    monkeypatch.setattr(torch, "as_tensor", lambda words, device: found[words])
    pump = SilentDrainer()
    custom = SimpleNamespace(disabled=False, meta_ptrs=[66, 77])
    way = aborter(group_of(Nccl(), custom), pump)
    assert pump.warmed == [16]
    assert not gpu.words.any()
    unblock([way], pump, lambda: True)  # type: ignore[arg-type]
    assert pump.drained == [way.signal]


@pytest.mark.parametrize(
    ("custom", "multicast", "words"),
    [
        (SimpleNamespace(disabled=False), None, "2688 bytes"),
        (None, SimpleNamespace(disabled=False), "multicast"),
    ],
)
def test_what_cannot_be_drained_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, custom: Any, multicast: Any, words: str
) -> None:
    monkeypatch.setattr("vllm._custom_ops.meta_size", lambda: 2_688)
    with capture_logs() as logs:
        way = aborter(group_of(None, custom, multicast), SilentDrainer())
    assert way.signal is None
    assert [each["event"] for each in logs] == ["group_not_drainable"]
    assert words in logs[0]["reason"]


def test_what_is_not_closed_is_drained_and_closed_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call may wait for room behind kernels that spin."""
    monkeypatch.setattr(collective_abort, "CLOSE_S", 0.02)
    nccl, pump = Nccl(), SilentDrainer()
    group = group_of(nccl)
    way = aborter(group, pump)
    way.signal = Signal(Gpu(0, 16, blocks=1).words, 16)
    nccl.go_on.clear()
    caller = in_a_thread(lambda: group.device_communicator.pynccl_comm.nccl.ncclAllReduce(1))
    assert nccl.is_inside.wait(PATIENCE_S)
    unblock([way], pump, lambda: True)  # type: ignore[arg-type]
    assert pump.drained == [way.signal]
    assert not nccl.calls
    nccl.go_on.set()
    caller.join(PATIENCE_S)
    unblock([way], pump, lambda: True)  # type: ignore[arg-type]
    until(lambda: "abort communicator" in nccl.calls)
