"""What the fp8 benchmark tries, and what it prints."""

import pytest

pytest.importorskip("vllm")

from tests.bench.kernel_fp8 import source_of
from tests.bench.kernel_fp8_tilings import SHAPES, tilings
from tests.harness.vllm.fp8_tilings import check_tiling
from worker.engine.weights.fp8_kernel import BLOCK_K, BUCKETS, Tiling, default_tiling


@pytest.mark.parametrize(("in_blocks", "table"), [(False, "TUNED"), (True, "TUNED_IN_BLOCKS")])
def test_the_benchmark_tries_what_can_run_and_prints_what_can_be_pasted(
    in_blocks: bool, table: str
) -> None:
    tuned = []
    for name, (outputs, inputs, _) in SHAPES.items():
        for bucket in BUCKETS:
            tried = list(tilings(bucket, outputs, inputs, in_blocks=in_blocks))
            assert tried[0] == default_tiling(bucket, outputs, inputs, in_blocks=in_blocks)
            assert not in_blocks or {each.block_k for each in tried} == {BLOCK_K}
            assert len(tried) == len(set(tried)) > 5
            for tiling in tried:
                check_tiling(tiling, bucket, outputs, inputs)
            tuned.append({"shape": name, "bucket": bucket, "tiling": tried[-1]})
    pasted: dict[str, dict[tuple[int, int, int], Tiling]] = {}
    exec(source_of(tuned, in_blocks), {"Tiling": Tiling}, pasted)
    outputs, inputs, _ = SHAPES["8b-tp2-down"]
    assert pasted[table][BUCKETS[-1], outputs, inputs] == tuned[-1]["tiling"]
