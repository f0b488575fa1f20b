"""How long a GPU idles between two steps: a vLLM plugin that marks them with pairs of CUDA events.

Loaded by vLLM in static engines and in aileron's ranks alike, as a general plugin from a generated
`dist-info` folder on PYTHONPATH (`plugin_folder`). It wraps the model runner's step when vLLM
imports it and records only while the file `on` exists in the folder that `GPU_BENCH_IDLE` names:
otherwise a step costs one look for that file, a microsecond or two.

A step is marked where its forward pass is launched and where its sampling ends. The gap from the
end of one to the start of the next holds idle time and the few small kernels that prepare inputs;
since those are alike in both, the comparison is of idle time. No profiler takes part.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER_ENV = "GPU_BENCH_IDLE"
PLUGIN = "aileron_gpu_bench"
SWITCH = "on"
RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")
"""Model runner V2 (CUDA) and V1 (CPU, for dry runs): modules with a `GPUModelRunner`."""
FLUSH_STEPS = 8
PATIENCE_STEPS = 4
"""Events are read this many steps later, when they are past on the device."""


class Clock:
    """Marks on the host's clock, where there is no CUDA."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def between_ms(self, earlier: Any, later: Any) -> float:
        """Milliseconds between two marks."""
        return float(later - earlier) * 1e3

    def is_past(self, mark: Any) -> bool:
        """Whether a mark can be read."""
        return True


class EventClock(Clock):
    """Marks in the current CUDA stream."""

    def mark(self) -> Any:
        """An event that passes when all work launched so far is done."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, earlier: Any, later: Any) -> float:
        """Milliseconds between two events of one device."""
        return float(earlier.elapsed_time(later))

    def is_past(self, mark: Any) -> bool:
        """Whether the device has passed the event."""
        return bool(mark.query())


class StepRecorder:
    """Notes steps while it is switched on, and appends them to a file as JSON lines."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._open: dict[str, Any] | None = None
        self._pending: deque[tuple[dict[str, Any], Any, Any]] = deque()
        self._last_end: Any = None
        self._lines: list[str] = []
        self._was_on = False

    def begin(self, width: int, counts: Sequence[int]) -> None:
        """A step of these tokens per request is about to be prepared."""
        is_on = (self._folder / SWITCH).exists()
        if self._was_on and not is_on:
            self._read(patience=0)
            self._flush()
            self._last_end = None
        self._was_on = is_on
        self._open = None
        if is_on and counts:
            self._open = {"width": width, "requests": len(counts), "tokens": sum(counts)}

    def launch(self) -> None:
        """The forward pass is launched next."""
        if self._open is not None:
            self._open["start"] = self._clock.mark()

    def end(self) -> None:
        """The step's last work is launched."""
        step, self._open = self._open, None
        if step is None or "start" not in step:
            return
        self._pending.append((step, step.pop("start"), self._clock.mark()))
        self._read(PATIENCE_STEPS)

    def _read(self, patience: int) -> None:
        while len(self._pending) > patience and self._clock.is_past(self._pending[0][2]):
            step, start, end = self._pending.popleft()
            step["busy_ms"] = self._clock.between_ms(start, end)
            known = self._last_end is not None
            step["gap_ms"] = self._clock.between_ms(self._last_end, start) if known else -1.0
            self._last_end = end
            self._lines.append(json.dumps(step))
        if len(self._lines) >= FLUSH_STEPS:
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            with (self._folder / f"steps-{os.getpid()}.jsonl").open("a") as file:
                file.write("".join(line + "\n" for line in lines))


class _OnImport(importlib.abc.MetaPathFinder):
    """Changes modules right after they are imported, so that the plugin need not import them."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as usual and change it when it has run."""
        change = self._changes.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


_recorders: dict[int, StepRecorder] = {}


def _recorder() -> StepRecorder:
    """The one of this process: forks have their own."""
    pid = os.getpid()
    if pid not in _recorders:
        import torch

        clock = EventClock() if torch.cuda.is_available() else Clock()
        _recorders[pid] = StepRecorder(Path(os.environ[FOLDER_ENV]), clock)
    return _recorders[pid]


def _wrap_runner(module: ModuleType) -> None:
    runner = module.GPUModelRunner
    execute, sample = runner.execute_model, runner.sample_tokens
    timing = getattr(module, "StepTimingCollector", None)

    def execute_model(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dummy_run"):
            width = self.vllm_config.parallel_config.tensor_parallel_size
            _recorder().begin(width, list(step.num_scheduled_tokens.values()))
            if timing is None:
                _recorder().launch()
        return execute(self, step, *args, **kwargs)

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        _recorder().end()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    if timing is not None:
        started = timing.forward_start

        def forward_start(self: Any) -> None:
            _recorder().launch()
            started(self)

        timing.forward_start = forward_start


def install() -> None:
    """Entry point of the plugin."""
    if FOLDER_ENV not in os.environ:
        return
    for name in RUNNERS:
        if name in sys.modules:
            _wrap_runner(sys.modules[name])
        else:
            sys.meta_path.insert(0, _OnImport({name: _wrap_runner}))


# ---------------------------------------------------------------------- the benchmark's side


def plugin_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes vLLM find the plugin."""
    info = folder / "plugin" / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = tests.bench.gpu_idle:install\n"
    )
    return info.parent


def switch_on(folder: Path) -> None:
    """Let all processes record, from their next step on."""
    for old in folder.glob("steps-*.jsonl"):
        old.unlink()
    (folder / SWITCH).touch()


def switch_off(folder: Path) -> None:
    """Let them stop."""
    (folder / SWITCH).unlink(missing_ok=True)


def recorded(folder: Path) -> Iterator[dict[str, float]]:
    """All steps, process by process; between two processes a step of no size."""
    for path in sorted(folder.glob("steps-*.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)
        yield {"width": 0, "requests": 0, "tokens": 0, "busy_ms": 0.0, "gap_ms": -1.0}
