"""One run of the GPU benchmark: servers one after the other, phases in each, results as they come.

Every phase is guarded: what fails is noted under `errors` and the next one goes on, and the JSON
file is written after each.
"""

import asyncio
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.bench import gpu_idle
from tests.bench.gpu_cell import RunningCell, running_cell
from tests.bench.gpu_numbers import idle_steps, memory_stages, told
from tests.bench.gpu_servers import (
    LOG_CHARS,
    StaticEngine,
    StaticServers,
    gpu_memory_mib,
    visible_gpus,
    wait_gpus_free,
)
from tests.bench.gpu_shapes import (
    COMPILATION,
    Load,
    Plan,
    as_arguments,
    engine_options,
    hidden_size,
    kv_bytes_per_token,
    layers,
    write_shape,
)
from tests.bench.gpu_switches import SwitchRun

PARTS = ("aileron", "static-dp", "static-tp", "static-pp", "static-default", "comm")
"""In this order: while the first is measured, the processes of the others import."""
MODES = ("dp", "tp", "sp", "shift", "pp")
SLOW_LINK_PARTS = (1, 2, 4)
"""In how many parts sp steps may exchange where the link is slow."""
START_LIMIT_S = 240
DEFAULT_START_LIMIT_S = 420
"""vLLM's own compilation takes minutes."""
PHASE_LIMIT_S = 90
LOAD_LIMIT_S = 180
"""Of loads that the command line names."""
SWITCH_LIMIT_S = 150


class Target(Protocol):
    """A server under measurement."""

    @property
    def is_alive(self) -> bool:
        """Whether its processes still run."""

    async def measure(self, kind: str, everywhere: bool, limit_s: float, **sizes: Any) -> Any:
        """Measure on one engine, or on all with these sizes each."""


@dataclass
class Setup:
    """What is measured, and where results go."""

    shape: str
    ranks: int
    device: str
    parts: tuple[str, ...]
    modes: tuple[str, ...]
    """Of aileron, each over all ranks."""
    switch_modes: tuple[str, str]
    """Between which of them it switches."""
    has_slow_link: bool
    """NCCL may not use peer access, and vLLM's all-reduce over it is off."""
    carries: tuple[str, ...]
    plan: Plan
    memory_share: float
    forms: dict[str, str]
    """Of weights and KV: engine options instead of the shape's own."""
    weights: dict[str, Any]
    """The cell's settings of where aileron's weights live."""
    folder: Path
    file: Path
    idle: Path | None
    started_s: float
    header: dict[str, Any]


class Run:
    """Measures one shape."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._plan = setup.plan
        self._model = write_shape(setup.shape, setup.folder)
        self._engine = engine_options(setup.shape, setup.device, setup.memory_share)
        self._engine |= setup.forms
        if setup.has_slow_link:
            self._engine["disable_custom_all_reduce"] = True
        self._static: dict[str, StaticServers] = {}
        self._baseline_mib: list[int] = []
        self.results: dict[str, Any] = {
            **setup.header,
            "shape": setup.shape,
            "ranks": setup.ranks,
            "engine": {**self._engine, "compilation_config": COMPILATION},
            "plan": dataclasses.asdict(setup.plan),
            "kv_bytes_per_token": kv_bytes_per_token(
                self._model, setup.forms.get("kv_cache_dtype", "auto")
            ),
            "servers": {},
            "aileron": {},
            "errors": {},
            "seconds": {},
        }

    def say(self, text: str) -> None:
        """A line of progress with the seconds since the start."""
        print(f"[{time.monotonic() - self._setup.started_s:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        """Write what is known."""
        partial = self._setup.file.with_suffix(".json.part")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(self._setup.file)

    async def measure(self) -> None:
        """All parts; whatever happens, no process of ours is left."""
        self._baseline_mib = gpu_memory_mib()
        self.say(f"{self._setup.shape} on {self._setup.ranks}, GPU memory {self._baseline_mib} MiB")
        try:
            for part in PARTS[1:-1]:
                if part in self._setup.parts:
                    self._static[part] = self._static_servers(part)
                    await self._static[part].spawn()
            for part in PARTS:
                if part in self._setup.parts:
                    await self._guard(part, self._part(part))
                    waited_s = await wait_gpus_free(self._baseline_mib)
                    self.say(f"{part} is gone after {waited_s:.1f} s")
        finally:
            for servers in self._static.values():
                servers.kill()
            self.save()
            self._save_logs()

    def _part(self, part: str) -> Awaitable[None]:
        if part == "comm":
            return self._measure_all_reduce()
        return self._aileron() if part == "aileron" else self._measure_static(part)

    def _save_logs(self) -> None:
        """After a failure: the ends of all servers' logs beside the results, in one file."""
        logs = sorted(self._setup.folder.rglob("*.log")) if self.results["errors"] else []
        texts = [
            f"==== {log.name}\n{log.read_text(errors='replace')[-10 * LOG_CHARS :]}" for log in logs
        ]
        if texts:
            self._setup.file.with_suffix(".log").write_text("\n".join(texts))

    async def _guard(self, name: str, work: Awaitable[Any]) -> Any:
        """Run a phase; a failure is noted, not raised."""
        started = time.monotonic()
        try:
            return await work
        except Exception as error:  # noqa: BLE001 -- one phase must not cost the others
            text = "".join(traceback.format_exception_only(error)).strip()
            self.results["errors"][name] = shortened(text)
            self.say(f"FAILED {name}: {shortened(text, end=2000)}")
            return None
        finally:
            self.results["seconds"][name] = round(time.monotonic() - started, 2)
            self.save()

    # ------------------------------------------------------------------ the phases of a server

    async def _measure_load(self, name: str, target: Target, *, is_dp: bool) -> None:
        plan = self._plan
        self.results["servers"].setdefault(name, {})
        for tokens, repeats in plan.ttft.items() if "ttft" in plan.kinds else ():
            sizes = {"tokens": tokens, "repeats": repeats}
            await self._phase(name, target, "ttft", str(tokens), False, sizes)
        for streams, prompt_tokens in plan.tpot.items() if "tpot" in plan.kinds else ():
            sizes = self._decode(streams, prompt_tokens)
            await self._phase(name, target, "tpot", str(streams), is_dp and streams > 1, sizes)
        per_gpu = plan.saturated_dp if is_dp else plan.saturated_tp
        usual = Load(per_gpu, plan.saturated_prompt, plan.saturated_tokens)
        loads = {load.name: load for load in plan.loads} or {"all": usual}
        for size, load in loads.items() if "saturated" in plan.kinds else ():
            sizes = {
                "requests": load.requests_per_gpu * (1 if is_dp else self._setup.ranks),
                "prompt_tokens": load.prompt,
                "tokens": load.answer,
            }
            await self._phase(name, target, "saturated", size, is_dp, sizes)
        await self._measure_idle(name, target, is_dp=is_dp)

    def _decode(self, streams: int, prompt_tokens: int) -> dict[str, int]:
        tokens = self._plan.tpot_tokens
        return {"streams": streams, "prompt_tokens": prompt_tokens, "tokens": tokens}

    async def _phase(
        self,
        name: str,
        target: Target,
        kind: str,
        size: str,
        everywhere: bool,
        sizes: dict[str, int],
    ) -> Any:
        label = f"{name} {kind} {size}"
        if not target.is_alive:
            self.results["errors"][label] = "not measured: the server has ended"
            return None
        limit_s = (
            LOAD_LIMIT_S if size in {load.name for load in self._plan.loads} else PHASE_LIMIT_S
        )
        work = target.measure(kind, everywhere, limit_s, vocab=self._plan.vocab, **sizes)
        result = await self._guard(label, work)
        if result is not None:
            self.results["servers"][name].setdefault(kind, {})[size] = result
            value = result.get("median_ms", result.get("tokens_per_s"))
            unit = "tokens/s" if kind == "saturated" else "ms"
            more = f" of {result['streams']} streams" if "streams" in result else ""
            self.say(f"{label}: {value} {unit}{more}")
        return result

    async def _measure_idle(self, name: str, target: Target, *, is_dp: bool) -> None:
        folder = self._setup.idle
        if folder is None:
            return
        gpu_idle.switch_on(folder)
        for streams in self._plan.idle_batches:
            prompt_tokens = self._plan.tpot.get(streams, self._plan.switch_prompt)
            sizes = self._decode(streams, prompt_tokens)
            label = f"{streams}, idle times recorded"
            await self._phase(name, target, "tpot", label, is_dp and streams > 1, sizes)
        gpu_idle.switch_off(folder)
        # One more step lets the process that gets it write its last ones.
        await self._guard(
            f"{name} idle", target.measure("ttft", False, PHASE_LIMIT_S, **self._last_step())
        )
        steps = idle_steps(gpu_idle.recorded(folder))
        self.results["servers"][name]["idle"] = steps
        self.save()
        for kind, numbers in steps.items():
            self.say(f"{name} idle, {kind}: {numbers}")

    def _last_step(self) -> dict[str, int]:
        return {"tokens": min(self._plan.ttft), "repeats": 1, "vocab": self._plan.vocab}

    # ------------------------------------------------------------------ static vLLM

    def _static_servers(self, part: str) -> StaticServers:
        setup = self._setup
        width = 1 if part == "static-dp" else setup.ranks
        options = dict(self._engine)
        if setup.device == "cuda" and part != "static-default":
            options["compilation_config"] = COMPILATION
        gpus = visible_gpus(setup.ranks)
        shares = [[gpu] for gpu in gpus] if width == 1 else [gpus]
        engines = []
        for number, share in enumerate(shares):
            sizes = {"tp": 1, "pp": width} if part == "static-pp" else {"tp": width, "pp": 1}
            spec = {"model": str(self._model), **sizes, "engine": options}
            env = {"CUDA_VISIBLE_DEVICES": ",".join(share)} if setup.device == "cuda" else {}
            engines.append(StaticEngine(f"{part}-{number}", setup.folder, spec, env))
        return StaticServers(engines, width)

    async def _measure_static(self, part: str) -> None:
        servers, ranks = self._static[part], self._setup.ranks
        is_dp = servers.width == 1
        name = f"{part} tp{ranks}" if part == "static-default" else f"static {part[-2:]}{ranks}"
        limit_s = DEFAULT_START_LIMIT_S if part == "static-default" else START_LIMIT_S
        try:
            self.say(f"{name} starts")
            facts = await servers.start(limit_s)
            per_token = self.results["kv_bytes_per_token"]
            facts |= {
                "kv_bytes_per_gpu": facts["kv_tokens"] * per_token // servers.width,
                "gpu_memory_mib": gpu_memory_mib(),
            }
            self.results["servers"][name] = facts
            self.say(f"{name} started in {facts['start_s']} s, KV {facts['kv_tokens']} tokens")
            await self._measure_load(name, servers, is_dp=is_dp)
        finally:
            servers.kill()

    async def _measure_all_reduce(self) -> None:
        """What one all-reduce of a full prefill step takes over NCCL, in a group of all ranks."""
        tokens = int(self._engine["max_num_batched_tokens"])
        size_mib = max(1, tokens * hidden_size(self._model) * 2 >> 20)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.kernel_comm", "--ranks", str(self._setup.ranks)),
            *("--only", "default", "--sizes-mib", str(size_mib)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(child.communicate(), PHASE_LIMIT_S)
        found = json.loads(out)
        self.results["all_reduce"] = {
            "tokens": tokens,
            "mib": size_mib,
            "us": found[f"width_{self._setup.ranks}"]["all_reduce_us"][str(size_mib)],
            "per_step": 2 * layers(self._model),
        }
        self.say(f"all-reduce: {self.results['all_reduce']}")

    # ------------------------------------------------------------------ aileron

    async def _aileron(self) -> None:
        setup, ranks = self._setup, self._setup.ranks
        folder = setup.folder / "cell"
        folder.mkdir()
        self.say("aileron starts")
        async with running_cell(
            folder,
            ranks=ranks,
            model=self._model,
            device=setup.device,
            engine_args=as_arguments(self._engine),
            settings={
                "exchange_parts": SLOW_LINK_PARTS if setup.has_slow_link else (1,),
                "peer_access": "off" if setup.has_slow_link else "auto",
                "pipelines": [f"pp{ranks}"] if "pp" in setup.modes else [],
                **setup.weights,
            },
        ) as cell:
            await self._note_cell(cell)
            for mode in setup.modes:
                layout = f"{mode}{ranks}"
                await self._guard(f"aileron to {layout}", cell.switch(layout))
                cell.engines = ranks if mode == "dp" else 1
                await self._measure_load(f"aileron {layout}", cell, is_dp=mode == "dp")
            for carry in setup.carries if self._plan.switches else ():
                await self._measure_switches(cell, carry)
            self.results["aileron"]["at_end"] = await cell.facts()
            if not cell.is_alive or self.results["errors"]:
                self.results["aileron"]["log"] = cell.tail()

    async def _note_cell(self, cell: RunningCell) -> None:
        ranks = self._setup.ranks
        facts = await cell.facts()
        kv_bytes = min(memory.get("kv", 0) for memory in facts["memory"])
        tokens = kv_bytes // self.results["kv_bytes_per_token"]
        step_times = (await cell.get("/admin/decisions"))["step_times"]
        log = (self._setup.folder / "cell" / "worker.log").read_text(errors="replace")
        self.results["aileron"] |= {
            "start_s": cell.start_s,
            **facts,
            "step_times": step_times,
            # What each stage of the start took of each rank's device.
            "device_memory": memory_stages(log),
            "exchange_parts": told(log, '"exchange_parts"'),
        }
        for mode in self._setup.modes:
            self.results["servers"][f"aileron {mode}{ranks}"] = {
                "start_s": cell.start_s,
                "kv_tokens": tokens * (1 if mode == "dp" else ranks),
                "kv_bytes_per_gpu": kv_bytes,
                "gpu_memory_mib": gpu_memory_mib(),
            }
        self.say(f"aileron started in {cell.start_s} s, KV {tokens} tokens per GPU")

    async def _measure_switches(self, cell: RunningCell, carry: str) -> None:
        if not cell.is_alive:
            self.results["errors"][f"switches, {carry}"] = "not measured: the cell has ended"
            return
        first, second = (f"{mode}{self._setup.ranks}" for mode in self._setup.switch_modes)
        run = SwitchRun(cell, (first, second), self._plan, carry)
        work = asyncio.wait_for(run.measure(), SWITCH_LIMIT_S)
        result = await self._guard(f"switches, {carry}", work)
        if result is None:
            await self._guard(f"clearing after {carry}", cell.client.clear())
            return
        self.results["aileron"].setdefault("switches", {})[carry] = result
        self.save()
        self.say(f"{result['switches']} switches, {carry}: {result['stopped'] or 'whole'}")
        for name, numbers in result["phases"].items():
            self.say(f"  {name}: {numbers}")
        for name in ("client_cut_over_ms", "client_stall_ms", "gpu_memory_mib"):
            self.say(f"  {name}: {result.get(name)}")


def shortened(text: str, end: int = 6000) -> str:
    """The start and the end of a long text."""
    return text if len(text) < end + 500 else f"{text[:500]}\n…\n{text[-end:]}"


def prepare_environment(idle: Path | None, device: str, root: Path) -> None:
    """What every server runs under; processes inherit it."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    if idle is not None:
        paths.insert(1, str(gpu_idle.plugin_folder(idle)))
        os.environ[gpu_idle.FOLDER_ENV] = str(idle)
        if os.environ.get("VLLM_PLUGINS"):
            os.environ["VLLM_PLUGINS"] += f",{gpu_idle.PLUGIN}"
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
