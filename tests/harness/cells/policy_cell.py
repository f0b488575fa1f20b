"""A CPU cell whose policy decides by step times that a test writes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.vllm.tiny_models import model_of

ARGUMENTS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")


@contextmanager
def policy_cell(
    folder: Path, ranks: int, step_times: str, policy: Mapping[str, Any], limits: Mapping[str, Any]
) -> Iterator[BareCell]:
    """Serve a random model of four layers, which pipeline stages divide."""
    times = folder / "step_times.yaml"
    times.write_text(step_times)
    own = folder / "cell"
    own.mkdir()
    with bare_cell(
        own,
        ranks=ranks,
        engine_args=[*ARGUMENTS],
        model=model_of("four-layers", folder),
        policy={**policy, "step_times": str(times)},
        limits=dict(limits),
    ) as cell:
        yield cell
