"""Configuration of a cell: one YAML file that every process reads, parsed and checked once.

Unknown keys are refused and relations between values are checked here, so no process starts with a
configuration that another one would refuse. Tokens and admin keys come from the environment only,
other secrets may refer to it. Names end in their unit. The chart's schema is made of these models.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from comm_pool.layout import Layout, LayoutError, Mode, parse_layout
from comm_pool.mixed import Mixed, Staged
from coordinator.protocol.addresses import is_loopback
from coordinator.protocol.gateway_config import REDIS_SCHEMES, GatewayConfig
from coordinator.protocol.log_config import LogConfig, UsageConfig
from coordinator.protocol.mistakes import MistakesError, run_checks, sentences_of
from coordinator.protocol.policy_config import PolicyConfig, SloConfig, TierSections
from coordinator.protocol.prepared_groups import mixed_groups, pipeline_groups
from coordinator.protocol.secret_text import SecretSetting, read_secret_file
from coordinator.protocol.settings_file import read_settings
from coordinator.protocol.tls_config import CellTlsConfig, check_pair
from coordinator.protocol.tracing_config import TracingConfig
from coordinator.protocol.yaml_words import AutoOff, OnOff

TOKEN_ENV = "AILERON_TOKEN"
"""Environment variable with the shared secret of a cell's processes."""

TOKEN_CHARS_MIN = 16
"""Shortest shared secret that is accepted."""

ENTANGLED = frozenset({"cell"})
"""Sections whose settings decide together what is valid, such as a layout for a number of ranks."""


class ConfigError(ValueError):
    """An unusable configuration; the message is one sentence that says what to change."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Frozen):
    """Which model, and vLLM's own options for it."""

    path: str
    """A Hugging Face id or a folder."""
    served_name: str = ""
    """Name on the API; empty means the id as it is, or a folder's last part."""
    other_names: tuple[str, ...] = ()
    """More names of the same model, which requests may use as well."""
    engine_args: tuple[str, ...] = ()
    """vLLM engine options as on its command line."""


LayerCount = Annotated[int, Field(ge=0)]


class CellConfig(_Frozen):
    """The ranks of one host and how they may be grouped."""

    ranks: int = Field(default=2, ge=1, le=64)
    """Devices of the host that serve; each has a process of its own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of these devices."""
    widths: tuple[int, ...] = (1, 2)
    """Numbers of ranks that a group may have: powers of two."""
    layout: str = "dp2"
    """Layout at start; it must name all ranks, such as tp2+dp2 for four."""
    mixed: tuple[str, ...] = ()
    """Mixed groups that layouts may have, such as sp2tp2; those of `layout` need no mention."""
    pipelines: tuple[str, ...] = ()
    """Pipeline groups that layouts may have, such as pp2; those of `layout` need no mention. On
    GPUs a stage is one rank."""
    weight_parts: int = Field(default=1, ge=1)
    """Parts of the weights: each rank holds one of them, so that more memory is left for KV, or so
    that a model fits that is larger than a device. `borrow` says what a rank does for the others.
    """
    borrow: Literal["none", "ffn", "all"] = "ffn"
    """Layers that ranks hold in parts if `weight_parts` is above 1, and read from each other during
    a step: `ffn` are feed-forward layers and experts, `all` are attention, embeddings and the
    output layer too. With `none` ranks hold parts of all layers but the embeddings and read
    nothing, so only the widest groups serve."""
    whole_layers: Literal["auto"] | LayerCount | tuple[LayerCount, ...] = 0
    """Layers of which every rank holds all parts, which makes small steps faster and
    leaves less memory for KV; `auto` takes the fewest with which a step can meet the tightest
    `tpot_ms` of a tier other than batch. A list has a number for each rank: a rank that holds all
    layers lends and borrows nothing, one that holds 0 has the most memory for KV on CUDA. A wide
    group uses as many KV pages of each rank as the smallest has."""
    host_kv_gib: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """Host memory, in GiB, for KV pages that all ranks share: prompts that were computed before,
    tasks that were preempted, and those of lost ranks are read from it instead of computed again.
    0 has none. `auto` takes a tenth of the machine's memory on CUDA, or of its cgroup's if that is
    less, and none on CPU or without the prefix cache."""
    peer_access: AutoOff = "auto"
    """Whether GPUs read each other's memory. With `off` none does, neither in moves of KV nor in
    collectives, as in a machine without NVLink and peer-to-peer access over PCIe; then no rank can
    borrow weights."""
    exchange_parts: tuple[Literal[1, 2, 4, 8], ...] = Field(default=(1,), min_length=1)
    """Numbers of parts into which a large sp step may split its exchange, to overlap it with
    products; ranks measure the fastest at start. [1, 2, 4] is for CUDA groups with slow links."""
    ranks_per_device: int = Field(default=1, ge=1)
    """Ranks that share a CUDA device, to try out wide groups on few devices: results are right, but
    steps are slow. Needs NCCL 2.30 and --kv-cache-memory-bytes."""
    threads_per_rank: int = Field(default=0, ge=0)
    """CPU compute threads of each rank; 0 divides all usable cores but one among the ranks."""
    dist_port: int = Field(default=0, ge=0, le=65535)
    """Port on loopback where CUDA ranks find each other; 0 lets `aileron up` choose a free one."""
    stuck_after_ms: int = Field(default=1_000, ge=100)
    """A CUDA rank ends if it has not left its group this long after the loss of a member: its
    collective could not be aborted. Set it half a second longer than a step, or more."""
    step_limit_ms: int = Field(default=30_000, ge=1_000)
    """A rank ends if it makes no progress for this long and for 20 times its longest measured step.
    The launcher ends a rank whose whole process stands still."""
    probe_after_switch: bool = False
    """Each group that a switch formed computes a fixed text before its first step. A mode whose
    result differs from that at start goes out of service. Delays the switch by a few steps."""


class TierLimits(_Frozen):
    """How much of a tier may wait for its first placement."""

    queue_tasks_max: int = Field(default=2_048, ge=1)
    """Most waiting tasks of the tier; the coordinator refuses one more with 429."""
    wait_ms: int = Field(default=120_000, ge=1)
    """Longest wait of a task; then it is refused with 429, or with 503 if no group serves."""


class TiersConfig(TierSections):
    """The bounds of each tier's queue."""

    interactive: TierLimits = TierLimits(queue_tasks_max=64, wait_ms=10_000)
    standard: TierLimits = TierLimits(queue_tasks_max=2_048, wait_ms=120_000)
    batch: TierLimits = TierLimits(queue_tasks_max=4_096, wait_ms=3_600_000)


class CoordinatorConfig(_Frozen):
    """Heartbeats, leases and the task pool."""

    listen: str = "127.0.0.1:8002"
    """host:port of the coordinator, for gateways and ranks."""
    heartbeat_ms: int = Field(default=200, ge=10)
    """Time between two reports of a rank that has nothing else to report."""
    lease_ms: int = Field(default=10_000, ge=100)
    """How long a leader may step after its last answered report."""
    lost_after_ms: int = Field(default=12_000, ge=100)
    """Silence after which a rank is cut out; at least `lease_ms`, or two layouts could overlap."""
    pause_limit_ms: int = Field(default=2_000, ge=0)
    """A task that is paused for longer goes back to the pool, to be recomputed."""
    queue_tasks_max: int = Field(default=4_096, ge=1)
    """Most waiting tasks; one more replaces a task of a lower tier, or is refused with 429."""
    tiers: TiersConfig = TiersConfig()
    ageing_ms: int = Field(default=30_000, ge=1)
    """Tasks that have waited this long get one placement in eight before more urgent ones."""
    default_carry: Literal["reshard", "pause", "drain", "recompute", "speculate"] = "reshard"
    """Carry plan of a switch that names none."""
    precopy: OnOff = "off"
    """Whether ranks copy full KV blocks of running tasks before a `reshard` switch stops their
    groups, so that less is left for the switch."""
    drain_limit_ms: int = Field(default=60_000, ge=0)
    """After this long a draining group recomputes the rest of its tasks."""
    history_switches_max: int = Field(default=1_000, ge=1)
    """Switches that `GET /admin/switches` can show."""
    stage_limit_ms: int = Field(default=10_000, ge=0)
    """A switch that waits this long for a rank in one stage excludes it for a while; 0: never."""
    slow_factor: float = Field(default=5.0, ge=0)
    """A rank whose dp steps take this many times as long as those of the others is excluded for a
    while; 0: never."""
    renew_idle_ms: int = Field(default=60_000, ge=0)
    """If a lost CUDA rank left wanted groups without communicators, all ranks restart together once
    the cell has had no request for this long; 0: never."""
    renew_busy_ms: int = Field(default=120_000, ge=0)
    """After this long the ranks of one such group restart while all others serve; 0: never."""


class BatchesConfig(_Frozen):
    """Files and batches of the OpenAI API."""

    data_dir: str = ""
    """Folder for files and, by default, the store; the same for all gateways. Empty: no batches."""
    storage: SecretSetting = "sqlite://"
    """Store of records and results: sqlite:// in the folder, or a redis:// URL."""
    storage_file: str = ""
    """File that holds the value of `storage`, instead of it."""
    lines_at_once: int = Field(default=64, ge=1, le=4_096)
    """Most lines of all batches that one gateway runs at once."""
    lease_ms: int = Field(default=15_000, ge=100)
    """Another gateway takes over a batch whose gateway has been silent for this long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        read_secret_file(self, "batches", "storage")
        if self.storage != "sqlite://" and not self.storage.startswith(REDIS_SCHEMES):
            raise ValueError("batches.storage must be sqlite:// or a redis:// URL.")
        return self


class FleetConfig(_Frozen):
    """Cells that share their gateways; without an entry there is one, at `coordinator.listen`."""

    cells: tuple[str, ...] = ()
    """host:port of every cell's coordinator, for gateways; empty if cells are found in `redis`."""
    redis: SecretSetting = ""
    """redis:// URL where cells announce themselves and gateways find them."""
    redis_file: str = ""
    """File that holds the value of `redis`, instead of it."""
    cell_name: str = ""
    """This cell's name in `redis`, for its coordinator; empty means the host's name."""
    advertise: str = ""
    """host:port at which gateways reach this cell's coordinator; `{host}` is the host's name, and
    empty means `coordinator.listen`."""
    lease_ms: int = Field(default=5_000, ge=100)
    """A cell that has not announced itself in `redis` for this long is no longer found there."""
    dead_after_ms: int = Field(default=2_000, ge=0)
    """A cell that a gateway cannot reach for this long is dead: its streams continue in another."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        read_secret_file(self, "fleet", "redis")
        redis, cells = self.redis, self.cells
        faults = {
            "fleet.cells and fleet.redis exclude each other: set one of them.": cells and redis,
            "fleet.redis must be a redis:// URL, or empty.": redis
            and not redis.startswith(REDIS_SCHEMES),
            "fleet.cells must be host:port addresses of coordinators.": any(
                not each.rpartition(":")[0] for each in cells
            ),
            "fleet.cells names a cell twice: remove one.": len(set(cells)) < len(cells),
        }
        if found := [sentence for sentence, is_found in faults.items() if is_found]:
            raise MistakesError(found)
        return self

    @property
    def is_on(self) -> bool:
        """Whether there may be more than one cell."""
        return bool(self.cells or self.redis)


class AdminConfig(_Frozen):
    """The admin port: admin API and metrics."""

    host: str = "127.0.0.1"
    """Address of the admin port; any but loopback needs `AILERON_ADMIN_KEY`."""
    port: int = Field(default=8001, ge=0, le=65535)
    """Admin port; 0 is any free one."""
    tls_cert_file: str = ""
    """PEM file with the admin port's certificate and its chain; empty serves HTTP."""
    tls_key_file: str = ""
    """PEM file with the private key of `tls_cert_file`; a changed pair is used within seconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_pair("admin", self.tls_cert_file, self.tls_key_file)
        return self

    @property
    def scheme(self) -> str:
        """The scheme of the admin port's URLs."""
        return "https" if self.tls_cert_file else "http"


class Config(_Frozen):
    """The configuration of all processes of a cell."""

    model: ModelConfig
    cell: CellConfig = CellConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    policy: PolicyConfig = PolicyConfig()
    gateway: GatewayConfig = GatewayConfig()
    batches: BatchesConfig = BatchesConfig()
    fleet: FleetConfig = FleetConfig()
    cell_tls: CellTlsConfig = CellTlsConfig()
    admin: AdminConfig = AdminConfig()
    slo: SloConfig = SloConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()
    usage: UsageConfig = UsageConfig()
    run_dir: str = ""
    """Folder for sockets and logs; empty means a fresh temporary one."""

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        run_checks(
            self._check_leases,
            self._check_parts,
            self._check_peer_access,
            self.mixed_groups,
            self.pipeline_groups,
            self._check_groups,
            self._check_widths,
            self._check_address,
            self._check_counters,
            self._check_token_address,
        )
        return self

    def _check_leases(self) -> None:
        if self.coordinator.lost_after_ms < self.coordinator.lease_ms:
            raise ValueError(
                "coordinator.lost_after_ms must be at least coordinator.lease_ms: a rank must stop "
                "by itself before it is cut out."
            )

    def _check_groups(self) -> None:
        ranks = self.cell.ranks
        fit = [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]
        if unfit := sorted(set(self.cell.widths).difference(fit)):
            raise ValueError(
                f"cell.widths has {unfit[0]}, and cell.ranks {ranks} cannot be divided into groups "
                f"of {unfit[0]}: use --widths {','.join(map(str, fit))}, or another --ranks."
            )

    def _check_widths(self) -> None:
        widest = max(self.cell.widths, default=1)
        for tier in ("interactive", "standard", "batch"):
            if (width := getattr(self.policy, tier).width_min) > widest:
                raise ValueError(
                    f"policy.{tier}.width_min is {width}, but the widest group of cell.widths is "
                    f"{widest}: lower it, or add the width."
                )

    def _check_address(self) -> None:
        is_guarded = self.gateway.keys_file or self.gateway.insecure_no_auth
        if not (is_guarded or is_loopback(self.gateway.host)):
            raise ValueError(
                f"gateway.host {self.gateway.host} can be reached from other machines: set "
                "gateway.keys_file (see `aileron key --help`), bind to 127.0.0.1, or set "
                "gateway.insecure_no_auth: true (--insecure-no-auth)."
            )

    def _check_peer_access(self) -> None:
        if self.cell.peer_access == "off" and self.borrows:
            raise ValueError(
                "cell.peer_access is off, so ranks cannot read layers from each other: set "
                "cell.borrow to none (--borrow none), or leave out peer_access."
            )

    def _check_parts(self) -> None:
        parts, layout = self.cell.weight_parts, self.initial_layout()
        if self.cell.whole_layers != 0 and not self.borrows:
            raise ValueError(
                f"cell.whole_layers is {self.cell.whole_layers}, but ranks read no layers from "
                "each other: set cell.weight_parts above 1 and cell.borrow to ffn or all "
                "(--weight-parts, --borrow), or leave it out."
            )
        if parts == 1:
            return
        counts = self.cell.whole_layers
        if isinstance(counts, tuple) and len(counts) != self.cell.ranks:
            raise ValueError(
                f"cell.whole_layers has {len(counts)} numbers for {self.cell.ranks} ranks: give "
                "one for each rank (--whole-layers 64,0), or one for all."
            )
        widest = max(self.cell.widths, default=1)
        if parts & (parts - 1) or parts > widest:
            raise ValueError(
                f"cell.weight_parts is {parts}: set it to a power of two up to the widest group of "
                f"cell.widths, {widest}."
            )
        if self.borrows:
            between = [group for group in layout.groups if 1 < group.width < widest]
            if between:
                raise ValueError(
                    f"cell.layout {self.cell.layout}: ranks with parts of the weights serve alone "
                    f"or in groups that are {widest} wide, not in {between[0].name}: use dp or "
                    f"tp{widest}, or leave out --weight-parts."
                )
            return
        if any(group.width != widest for group in layout.groups):
            raise ValueError(
                f"cell.layout {self.cell.layout}: each rank holds one of {parts} parts of the "
                f"weights and borrows none, so use only groups that are {widest} wide, such as "
                f"tp{widest}, or let ranks borrow (--borrow ffn)."
            )
        whole = [
            group
            for group in layout.groups
            if group.mode in (Mode.SP, Mode.SHIFT) and group.tp == 1
        ]
        if whole:
            raise ValueError(
                f"cell.layout {self.cell.layout}: {whole[0].name} needs all of the weights on each "
                f"rank, which holds one of {parts} parts and borrows none: use tp{widest} or a "
                "mixed mode, or let ranks borrow (--borrow ffn)."
            )
        if self.policy.name == "adaptive":
            raise ValueError(
                "policy.name adaptive has no layouts to choose from if cell.weight_parts is above "
                "1 and cell.borrow is none: let ranks borrow (--borrow ffn), or leave it out and "
                "use a shift group, which chooses for each step."
            )

    def _check_counters(self) -> None:
        gateway = self.gateway
        is_shared = gateway.rate_limit_storage != "memory://"
        if gateway.processes > 1 and gateway.keys_file and not is_shared:
            raise ValueError(
                "gateway.processes above 1 with gateway.keys_file: each process would count "
                "requests per minute for itself; set gateway.rate_limit_storage to a redis:// URL."
            )

    def _check_token_address(self) -> None:
        if self.gateway.processes > 1 and not self.gateway.token_listen.endswith(":0"):
            raise ValueError(
                "gateway.token_listen must end in :0 (any free port) where gateway.processes is "
                "above 1: every process listens on its own."
            )

    def initial_layout(self) -> Layout:
        """The layout to start in; raises ValueError if the cell cannot form it."""
        try:
            return parse_layout(self.cell.layout, self.cell.ranks, self.cell.widths)
        except LayoutError as error:
            raise ValueError(f"cell.layout: {error}") from error

    def mixed_groups(self) -> tuple[Mixed, ...]:
        """The mixed shapes that ranks prepare; raises ValueError if they cannot prepare one."""
        return mixed_groups(self.cell, self.initial_layout().groups)

    def pipeline_groups(self) -> tuple[Staged, ...]:
        """The pipeline groups that ranks prepare; raises likewise."""
        return pipeline_groups(self.cell, self.initial_layout().groups)

    @property
    def borrows(self) -> bool:
        """Whether ranks read parts of the weights from each other."""
        return self.cell.weight_parts > 1 and self.cell.borrow != "none"

    @property
    def copy_width(self) -> int:
        """The number of aligned ranks that hold one copy of the weights, or several, together."""
        return 1 if self.cell.weight_parts == 1 else max(self.cell.widths)

    @property
    def narrowest(self) -> int:
        """The narrowest groups that can serve."""
        return 1 if self.borrows else self.copy_width

    @property
    def served_model_name(self) -> str:
        """The model's name on the API."""
        path = self.model.path.rstrip("/")
        is_id = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
        is_id = is_id and not Path(path).is_dir()
        return self.model.served_name or (path if is_id else path.rsplit("/", 1)[-1])

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """All names of the model on the API; the first one stands in answers."""
        return tuple(dict.fromkeys((self.served_model_name, *self.model.other_names)))


def load_config(path: Path) -> Config:
    """Read and check a YAML file; raises `ConfigError` with every fault of it and its line."""
    try:
        reading = read_settings(path, Config, ENTANGLED)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    if reading.value is None:
        raise ConfigError(f"{path}: {' '.join(map(str, reading.faults))}")
    return reading.value


def check_config(data: object) -> Config:
    """Check already parsed data; raises `ConfigError` with one sentence per mistake."""
    if not isinstance(data, dict):
        raise ConfigError("the configuration has no settings: write `name: value` lines.")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(sentences_of(error, Config)) from error


def dump_config(config: Config) -> str:
    """YAML text that `load_config` reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def shared_token() -> str:
    """The cell's shared secret from the environment; raises `ConfigError` if it is missing."""
    token = os.environ.get(TOKEN_ENV, "")
    if len(token) < TOKEN_CHARS_MIN:
        raise ConfigError(
            f"set {TOKEN_ENV} to a secret of at least {TOKEN_CHARS_MIN} characters, the same for "
            "every process of the cell."
        )
    return token
