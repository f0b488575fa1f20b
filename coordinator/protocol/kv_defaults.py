"""The KV memory and block sizes that ranks get where the user names none."""

CPU_BLOCK_TOKENS = 32
"""Default tokens per slot on CPU; vLLM's CPU attention needs multiples of 32."""

CUDA_BLOCK_TOKENS = 16
"""Default tokens per slot on CUDA: vLLM's; a test compares it."""

CPU_KV_BYTES_MAX = 512 * 1024**2
"""Default maximum of KV memory per CPU rank."""

CPU_KV_SHARE = 0.25
"""Default share of the available memory that all CPU ranks together use for KV."""


def cpu_kv_bytes(available_bytes: int, ranks: int) -> int:
    """Return the default KV memory of each of a cell's ranks on CPU."""
    return min(int(available_bytes * CPU_KV_SHARE / ranks), CPU_KV_BYTES_MAX)
