"""A checkpoint on two ranks, and the two things that must be so in each of its layouts."""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.cells import devices
from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.vllm.cuda_scores import ENGINE, moved_logits, score, scored, scores_of, text

LAYOUTS = ("tp2", "dp2", "sp2", "shift2")
SWITCHES = 12
TOKENS = 200
ROUNDING, MEAN_ROUNDING = 0.05, 0.01
"""What log-probabilities in bf16 may be off by, at least: one of them, and in the mean."""


@dataclass
class Served:
    """A checkpoint in a cell, and plain vLLM's scores of it by tp size."""

    kind: str
    static: dict[int, Any]
    cell: BareCell

    @property
    def limit(self) -> float:
        """How far scores may be from static tp 2, by what tp 1 and tp 2 differ by."""
        by_nature = float(np.abs(self.static[2] - self.static[1]).max())
        return max(2 * by_nature, ROUNDING)

    @property
    def mean_limit(self) -> float:
        """The same in the mean: where a router chooses another expert, single scores move far."""
        by_nature = float(np.abs(self.static[2] - self.static[1]).mean())
        return max(1.5 * by_nature, MEAN_ROUNDING)


def static_scores(folder: Path, model: Path, has_experts: bool, **spec: Any) -> dict[int, Any]:
    """Plain vLLM's scores, by tp size; with two ranks each has whole experts, as ours have.

    Halves of all experts instead move single scores by 0.33 (Mixtral), where a router chooses
    another expert.
    """
    return {
        tp: scores_of(
            *(folder, [text()]),
            tp=tp,
            model=str(model),
            expert_parallel=has_experts and tp > 1,
            **spec,
        )[0]
        for tp in (1, 2)
    }


@contextmanager
def serving(
    folder: Path,
    kind: str,
    model: Path,
    *,
    limits: Mapping[str, Any],
    kv_cache_dtype: str = "auto",
    has_experts: bool = False,
    moe_backend: str = "auto",
    linear_backend: str = "auto",
) -> Iterator[Served]:
    """Serve a checkpoint on two ranks in bf16; plain vLLM has scored it and is gone."""
    own = {"kv_cache_dtype": kv_cache_dtype, "linear_backend": linear_backend}
    static = static_scores(folder, model, has_experts, moe_backend=moe_backend, **own)
    with bare_cell(
        folder,
        ranks=2,
        model=model,
        engine_args=[
            *("--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype),
            *("--linear-backend", linear_backend, *ENGINE),
        ],
        device="cuda",
        limits={"layout": "tp2", **devices.limits(2), **limits},
        pause_limit_ms=60_000,
    ) as up:
        yield Served(kind, static, up)


def check_loss(served: Served, layout: str) -> None:
    """The layout scores a text as static vLLM does."""
    scores, wanted = asyncio.run(score(served.cell, layout)), served.static[2]
    errors = np.abs(scores - wanted)
    error, mean = float(errors.max()), float(errors.mean())
    line = f"{served.kind} {layout}: largest {error:.4f} of {served.limit:.4f}"
    line += f", mean {mean:.4f} of {served.mean_limit:.4f}"
    line += (
        f", 99 % {np.quantile(errors, 0.99):.4f}, {(errors > served.limit).sum()} over the limit"
    )
    print(line, f"loss {-scores.mean():.4f} static {-wanted.mean():.4f}")
    assert error <= served.limit, line
    assert mean <= served.mean_limit, line
    assert abs(scores.mean() - wanted.mean()) < 0.02, line


def check_moves(served: Served) -> None:
    """Tasks that move over switches draw from the logits that their whole text has.

    Where ranks share a KV head, tasks are computed again instead of moved.
    """
    draw = random.Random(1)
    layouts = [draw.choice(LAYOUTS) for _ in range(SWITCHES)]
    moved = asyncio.run(moved_logits(served.cell, "dp2", layouts, TOKENS))
    given = asyncio.run(scored(served.cell, "tp2", [ids for ids, _ in moved]))
    errors = [
        float(np.abs(drawn - logits[-drawn.size :]).max())
        for (_, drawn), logits in zip(moved, given, strict=True)
    ]
    records = served.cell.get(f"/admin/switches?last={SWITCHES}")["switches"]
    print(served.kind, layouts, "largest logit errors", errors)
    config = json.loads((Path(served.cell.config.model.path) / "config.json").read_text())
    carry = "reshard" if config["num_key_value_heads"] > 1 else "recompute"
    assert sum(record["tasks"][carry] for record in records) >= SWITCHES
    assert max(errors) <= max(4 * served.limit, 0.3)
