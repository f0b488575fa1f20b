"""vLLM adapter: a rank's range of experts computes with the tiling tuned for all experts.

vLLM ships tilings of its Triton kernel by the number of experts, their size and the GPU, and falls
back to a general one where it has none. It has few for halves and quarters of a model's experts. A
range keeps the size of each expert and the tokens that each gets, so the whole's tiling suits it.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.model_executor.layers.fused_moe import fused_moe

_SHIPPED = Path(str(files("vllm.model_executor.layers.fused_moe"))) / "configs"
_find = fused_moe.get_moe_configs
_whole_count = 0
"""Experts of the model's layers."""


def tune_ranges_of(count: int) -> None:
    """Let ranges of this number of experts take the tiling of all where they have none."""
    global _whole_count  # noqa: PLW0603 -- vLLM's lookup is a function of its module, too
    _whole_count = count
    fused_moe.get_moe_configs = find_tilings


def find_tilings(
    E: int,  # noqa: N803 -- vLLM's name
    N: int,  # noqa: N803
    dtype: str | None,
    block_n: int | None = None,
    block_k: int | None = None,
) -> dict[int, Any] | None:
    """Return tilings by the tokens of a step: those of E experts of size N, or of all experts."""
    count = _tuned_count(E, _whole_count, N, dtype, block_n, block_k)
    found: dict[int, Any] | None = _find(count, N, dtype, block_n, block_k)
    return found


@cache
def _tuned_count(
    count: int, whole: int, size: int, dtype: str | None, block_n: int | None, block_k: int | None
) -> int:
    """Return for how many experts to look: each layer of each step that no graph has asks."""
    block = [block_n, block_k] if block_n and block_k else None
    for each in (count, whole):
        name = fused_moe.get_config_file_name(each, size, dtype, block)
        if each % count == 0 and _is_tuned(name):
            return each
    return count


def _is_tuned(name: str) -> bool:
    own = envs.VLLM_TUNED_CONFIG_FOLDER
    folders = [_SHIPPED] if own is None else [Path(own), _SHIPPED]
    return any((folder / name).exists() for folder in folders)
