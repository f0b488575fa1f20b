"""The memory of a GPU that neither weights nor KV can use, before any rank has started. Pure.

The product measures each of these at start (worker/engine/rank_engine.py). The numbers here are
estimates from the dated runs on H200s under docs/benchmarks/, in torch 2.11 and vLLM 0.32, with
CUDA graphs and without torch.compile; `tests/unit/bench/test_plan_records.py` compares the sums
with what these runs had left for KV. Sizes are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.protocol.held_weights import Borrow
from coordinator.protocol.model_size import ModelSize

GIB = 2**30
MB = 10**6

DRIVER = 600 * 2**20
"""What nvidia-smi lists and CUDA does not offer: 143,771 MiB of an H200 against 139.8 GiB."""
CONTEXT = 552 * MB
"""CUDA's context; vLLM does not count it against its share. Runs of 2026-11-22 and later."""
COMMUNICATOR = 975 * MB
"""NCCL, custom all-reduce and their buffers for one width. Runs of 2026-11-24 and later."""
COMMUNICATOR_MORE = 420 * MB
"""The same for each further width (tp4 beside tp2): the runs of 2026-11-21 on four GPUs."""
LIBRARIES = 290 * MB
"""Libraries that communicators load, and free parts of torch's blocks after loading."""
GRAPHS = 1_070 * MB
"""CUDA graphs of one width in models of 64 layers or more. Runs of 2026-11-22 and later."""
GRAPHS_LAYER = 16 * MB
"""The same for each layer of smaller models: 8B of 2026-11-21, scaled by 32B of both dates."""
BORROWING_GRAPHS = 0.68
"""Share of these that cells have whose ranks borrow: fewer sizes. Runs of 2026-11-27 at 0.524."""
RUNNER = 28 * MB
"""A runner's buffers besides its counts of tokens. Runs of 2026-11-24 and later."""
COUNT_BYTES = 4.125
"""Bytes of a runner per task and row of the vocabulary: a count, and a bit of the prompt."""
SAMPLER_COPIES = 3
"""Logits, probabilities and sorted ones, of four bytes each, when every task gets a token. Not
measured: all runs have `--max-num-seqs 256`, where the feed-forward layers need more."""
RESIDUALS = 4
"""Rows of the hidden size per token at the peak of a step: 3 in Llama, 4 in Qwen3."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """vLLM's limits of one step."""

    tokens: int
    """`--max-num-batched-tokens`."""
    tasks: int
    """`--max-num-seqs`."""


def default_limits(memory_bytes: int) -> StepLimits:
    """Return vLLM's defaults for a GPU of this size that is no A100; a test compares them."""
    if memory_bytes >= 160 * GIB:
        return StepLimits(16_384, 1_024)
    return StepLimits(8_192, 1_024) if memory_bytes >= 70 * GIB else StepLimits(2_048, 256)


@dataclass(frozen=True, slots=True)
class OtherMemory:
    """What a rank's device needs besides weights and KV, in bytes."""

    activations: int
    graphs: int
    communicators: int
    workspace: int
    """Libraries, and the runners' buffers."""

    @property
    def total(self) -> int:
        """All that counts against the share of the device."""
        return self.activations + self.graphs + self.communicators + self.workspace


def other_memory(
    size: ModelSize,
    limits: StepLimits,
    widths: Sequence[int],
    *,
    mixed: int = 0,
    parts: int = 1,
    borrow: Borrow = "ffn",
    experts_per_token: int = 1,
    eager: bool = False,
) -> OtherMemory:
    """Return the memory of a rank that serves in groups of `widths`, and in `mixed` shapes.

    Activations and logits have two bytes per element.
    """
    wide = sum(width > 1 for width in widths) + mixed
    borrows = parts > 1 and borrow != "none"
    graphs = 0 if eager else min(GRAPHS, size.layers * GRAPHS_LAYER) * len(widths)
    counts = int(limits.tasks * size.rows * COUNT_BYTES)
    return OtherMemory(
        activations=_activations(size, limits, parts, experts_per_token, borrows=borrows),
        graphs=int(graphs * BORROWING_GRAPHS) if borrows else graphs,
        communicators=COMMUNICATOR + COMMUNICATOR_MORE * (wide - 1) if wide else 0,
        workspace=LIBRARIES + (counts + RUNNER) * len(widths),
    )


def _activations(
    size: ModelSize, limits: StepLimits, parts: int, experts_per_token: int, *, borrows: bool
) -> int:
    """Return the peak of the largest step: its feed-forward layer, or its logits.

    A part of a feed-forward layer needs a part of the inner features; a rank that borrows also
    keeps the sum of its parts.
    """
    rows = RESIDUALS + borrows
    if size.expert_layers:
        inner = size.inner // size.experts
        features = experts_per_token * (max(2 * inner, size.hidden) + inner)
    else:
        features = size.dense_elements // size.hidden // parts
    layer = limits.tokens * (features + rows * size.hidden) * 2
    logits = (limits.tasks * size.rows * SAMPLER_COPIES * 4) + limits.tokens * size.hidden * 2
    return max(layer, logits)
