"""vLLM adapter: gets a rank out of CUDA collectives with a lost peer, alive.

Custom all-reduce spins on counters in the rank's memory, also inside CUDA graphs. They are
*drained*: another stream sets them to the expected values, so all blocks pass every barrier. NCCL's
kernels wait for their peer's data. They are *closed*: they end when their communicator, vLLM's or
that of torch's process group, is aborted. Results of such a step are invalid, so its formation must
be marked as aborted before. These processes never form the group again.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.distributed as dist
from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import GroupCoordinator

from comm_pool.formations import PeerLostError

log = structlog.get_logger()

BLOCKS = 36
"""Maximum blocks of a custom all-reduce; each has its own counters."""

PEERS = (16, 8)
"""Members for which vLLM's counters have room: 16 in 0.32, 8 before."""

LINE_BYTES = 128
WORD_BYTES = 4

CLOSE_S = 0.2
"""How long to wait for an NCCL call in progress.

The call may itself wait until spinning kernels make room, which the next round brings.
"""

DRAIN_S = 0.08
"""Maximum time of one draining round."""

AHEAD = 2
"""Barriers of one kernel after which a block's flag is sure to be visible."""

BARRIERS = 64
"""Barriers that blocks pass before the pump checks whether it is still wanted."""

LOOK_S = 0.00002

GUARD_NAME = "nccl_guard"
"""The attribute of a group's communicator that holds the gate of its NCCL."""

TORCH_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv"),
    *("gather", "broadcast", "send", "recv"),
)
"""Methods of vLLM's communicator that may use torch's process group."""


def _in_lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


def signal_bytes(peers: int) -> int:
    """Return the size of the counters with room for `peers` members."""
    return _in_lines(2 * _in_lines(BLOCKS * peers * WORD_BYTES) + BLOCKS * WORD_BYTES)


def peers_of(size: int) -> int | None:
    """Return how many members counters of this size have room for; None if unknown."""
    return next((peers for peers in PEERS if signal_bytes(peers) == size), None)


class Signal:
    """A view of the counters by which one rank's custom all-reduce waits for its peers.

    There are (BLOCKS, peers) counters for the start of a kernel, as many for its end, and a flag
    per block. A block waits until the counter of each peer equals its own flag plus one, exactly.
    Then it raises its flag. The raised flag may stay invisible until the block's kernel has ended,
    so counters are also set further ahead.
    """

    def __init__(self, words: torch.Tensor, peers: int) -> None:
        """`words` (int32) are all of them, as they lie in memory."""
        self._words, self._peers = words, peers
        self._apart = _in_lines(BLOCKS * peers * WORD_BYTES) // WORD_BYTES
        self._flags = words[2 * self._apart : 2 * self._apart + BLOCKS]
        self._read = torch.zeros(BLOCKS, dtype=torch.int32, pin_memory=words.is_cuda)

    def let_through(self) -> None:
        """Let every waiting block pass at most `BARRIERS` barriers; allocates nothing."""
        # Imported here: it brings Triton, and on CPU nothing is drained.
        from comm_pool.cuda import signal_kernel

        passes = BARRIERS // AHEAD
        signal_kernel.launch(self._words, BLOCKS, self._peers, self._apart, AHEAD, passes)

    def begin_reading(self) -> None:
        """Copy the flags to the host, on the current stream; never waits."""
        self._read.copy_(self._flags, non_blocking=True)

    def read_total(self) -> int:
        """Return the sum of the flags as of the last reading that has ended."""
        return int(self._read.sum())


class _Words:
    """Device memory outside torch's allocator, as an array of int32."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size // WORD_BYTES,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 2,
        }


class SignalPump:
    """Unblocks the kernels of one device, from another thread."""

    def __init__(self, device: torch.device) -> None:
        """Made by the thread whose steps it unblocks."""
        self._device = device
        self._steps: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None
        self._reader: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._warmed: set[int] = set()
        if device.type == "cuda":
            self._steps = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._reader = torch.cuda.Stream(device, priority=-1)
            self._event = torch.cuda.Event()

    def warm(self, peers: int) -> None:
        """Load the kernels: at first use, CUDA would queue the load after those that spin.

        It uses memory of its own: counters in use would let a peer through too early.
        """
        if peers in self._warmed:
            return
        self._warmed.add(peers)
        size = signal_bytes(peers) // WORD_BYTES
        words = torch.zeros(size, dtype=torch.int32, device=self._device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._beside(self._stream):
            Signal(words, peers).let_through()
        if self._stream is not None:
            self._stream.synchronize()

    def drain(self, signals: Sequence[Signal], is_wanted: Callable[[], bool]) -> None:
        """Unblock their blocks while that is wanted, for at most `DRAIN_S`.

        It never waits for the device, which may hang for another reason.
        """
        until_s = time.monotonic() + DRAIN_S
        launches = 0
        with self._beside(self._stream):
            while is_wanted() and time.monotonic() < until_s:
                if self._event is None or self._event.query():
                    launches += 1
                    for signal in signals:
                        signal.let_through()
                    if self._event is not None:
                        self._event.record()
                time.sleep(LOOK_S)
        # Flags that stand still tell that the device waits for something else, if for anything.
        flags = [signal.read_total() for signal in signals]
        is_idle = self._steps is None or self._steps.query()
        is_over = not is_wanted()
        about = {"flags": flags, "is_idle": is_idle, "is_over": is_over}
        log.info("collectives_let_through", barriers=launches * BARRIERS, **about)
        if not is_over:
            with self._beside(self._reader):
                for signal in signals:
                    signal.begin_reading()

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Launch on this stream, beside the in-flight steps."""
        if stream is None:
            beside: AbstractContextManager[Any] = nullcontext()
        else:
            torch.cuda.set_device(self._device)
            beside = torch.cuda.stream(stream)
        with torch.inference_mode(), beside:
            yield


class CallGate:
    """A gate before the calls of one communicator: once closed, it lets none through.

    A call with an aborted communicator would crash the process.
    """

    def __init__(self, formation: Callable[[], int]) -> None:
        """`formation` returns the formation that a call belongs to."""
        self._formation = formation
        self._lock = threading.RLock()
        self._is_closed = False

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with the gate before it."""

        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self.undivided():
                return call(*args, **kwargs)

        return guarded

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Make all calls inside or none; raises `PeerLostError` if the gate is closed."""
        with self._lock:
            if self._is_closed:
                raise PeerLostError(self._formation())
            yield

    def close(self, wait_s: float) -> bool:
        """Block further calls once the one in progress has ended; return False if it does not."""
        if not self._lock.acquire(timeout=wait_s):
            return False
        self._is_closed = True
        self._lock.release()
        return True


class GuardedLibrary:
    """vLLM's NCCL library for one communicator, its calls guarded."""

    def __init__(self, nccl: Any, guard: CallGate) -> None:
        self._nccl = nccl
        self._guard = guard

    def __getattr__(self, name: str) -> Any:
        """Return the library's attribute, guarded if it is an NCCL call."""
        found = getattr(self._nccl, name)
        if not (name.startswith("nccl") and callable(found)):
            return found
        guarded = self._guard.guarded(found)
        setattr(self, name, guarded)  # Later look-ups find it without this method.
        return guarded


@dataclass(frozen=True, slots=True)
class _Nccl:
    """How one group uses NCCL: an in-place all-reduce, and a call that aborts all of it."""

    all_reduce: Callable[[torch.Tensor], object]
    abort: Callable[[], object]


def _through_vllm(pynccl: Any, guard: CallGate) -> _Nccl:
    """Use vLLM's binding, if the installed NCCL has all that vLLM's version needs."""
    library = pynccl.nccl
    pynccl.nccl = GuardedLibrary(library, guard)

    def all_reduce(tensor: torch.Tensor) -> object:
        return pynccl.all_reduce(tensor, tensor, stream=torch.cuda.current_stream())

    return _Nccl(all_reduce, lambda: library.ncclCommAbort(pynccl.comm))


def _through_torch(group: GroupCoordinator, guard: CallGate) -> _Nccl:
    """Use torch's process group, which vLLM falls back to if its binding does not load."""
    communicator, torchs = group.device_communicator, group.device_group
    for name in TORCH_COLLECTIVES:
        if (call := getattr(communicator, name, None)) is not None:
            setattr(communicator, name, guard.guarded(call))
    return _Nccl(
        lambda tensor: dist.all_reduce(tensor, group=torchs),
        lambda: torchs._get_backend(group.device).abort(),
    )


def undivided(communicator: Any) -> AbstractContextManager[None]:
    """Make all calls of a group's communicator inside or none, never a part of them."""
    guard = getattr(communicator, GUARD_NAME, None)
    return guard.undivided() if guard is not None else nullcontext()


class CollectiveAborter:
    """Aborts the collectives of one group."""

    def __init__(
        self, group: GroupCoordinator, pump: SignalPump, formation: Callable[[], int]
    ) -> None:
        """Guard the group's NCCL; to be made before the first step."""
        self._name = "-".join(map(str, group.ranks))
        self._device = group.device
        communicator = group.device_communicator
        self._guard = CallGate(formation)
        setattr(communicator, GUARD_NAME, self._guard)
        pynccl = _enabled(communicator, "pynccl_comm")
        self._nccl = (
            _through_vllm(pynccl, self._guard)
            if pynccl is not None
            else _through_torch(group, self._guard)
        )
        self._held = self._hold()
        self._is_closed = False
        self.signal = self._find_signal(group, pump)
        """The counters to drain, if there are any."""
        if _enabled(communicator, "symm_mem_comm") is not None:
            reason = "multicast all-reduce is on, which waits in another way"
            log.warning("group_not_drainable", group=self._name, reason=reason)

    def _find_signal(self, group: GroupCoordinator, pump: SignalPump) -> Signal | None:
        custom = _enabled(group.device_communicator, "ca_comm")
        if custom is None:
            return None
        size = int(ops.meta_size())
        peers = peers_of(size)
        if peers is None:
            reason = f"the counters of custom all-reduce take {size} bytes, which is unknown"
            log.warning("group_not_drainable", group=self._name, reason=reason)
            return None
        pump.warm(peers)
        words = _Words(custom.meta_ptrs[group.rank_in_group], size)
        return Signal(torch.as_tensor(words, device=group.device), peers)

    def _hold(self) -> Any:
        """Return an object that keeps an abort from freeing memory; None if there can be none."""
        if self._device.type != "cuda":
            return True
        try:
            return _holding_graph(self._nccl, self._device)
        except RuntimeError as error:
            reason = f"no graph holds its communicator: {error}"
            log.warning("group_not_drainable", group=self._name, reason=reason)
            return None

    def close(self) -> bool:
        """Abort the group's NCCL; return False if a call of it does not end in time."""
        if self._is_closed or self._held is None:
            return True
        if not self._guard.close(CLOSE_S):
            return False
        self._is_closed = True
        # The abort first signals the kernels, and then never returns: a graph holds the
        # communicator.
        threading.Thread(target=self._abort, name=f"abort {self._name}", daemon=True).start()
        return True

    def _abort(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._nccl.abort()
        except RuntimeError:
            log.exception("communicator_not_aborted", group=self._name)


def _holding_graph(nccl: _Nccl, device: torch.device) -> Any:
    """Return a graph that holds a communicator, and is never replayed.

    `ncclCommAbort` signals the kernels, waits for graphs to release the communicator, and then
    frees its memory. Freeing waits for the whole device with the driver's lock held, so nobody
    could launch what unblocks the kernels. With this graph it never gets there.
    """
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(64, device=device)
    with torch.cuda.graph(graph):
        nccl.all_reduce(tensor)
    return graph, tensor


def _enabled(communicator: Any, name: str) -> Any:
    found = getattr(communicator, name, None)
    return None if found is None or found.disabled else found


def unblock(
    ways: Sequence[CollectiveAborter], pump: SignalPump, is_wanted: Callable[[], bool]
) -> None:
    """Close and drain groups for good while `is_wanted` holds; repeat it until it does not.

    Collectives that wait by any other mechanism stay blocked.
    """
    for way in ways:
        if not way.close():
            log.warning("communicator_not_closed", reason="a call of it is under way")
    signals = [way.signal for way in ways if way.signal is not None]
    if signals:
        pump.drain(signals, is_wanted)
