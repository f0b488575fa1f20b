"""What the fp8 benchmark tries, and what it prints."""

import pytest

pytest.importorskip("vllm")

from tests.bench.kernel_fp8 import source_of
from tests.bench.kernel_fp8_tilings import SHAPES, tilings
from tests.harness.vllm.fp8_tilings import check_tiling
from worker.engine.weights.fp8_kernel import BUCKETS, Tiling, default_tiling


def test_the_benchmark_tries_what_can_run_and_prints_what_can_be_pasted() -> None:
    tuned = []
    for name, (outputs, inputs, _) in SHAPES.items():
        for bucket in BUCKETS:
            tried = list(tilings(bucket, outputs, inputs))
            assert tried[0] == default_tiling(bucket, outputs, inputs)
            assert len(tried) == len(set(tried)) > 5
            for tiling in tried:
                check_tiling(tiling, bucket, outputs, inputs)
            tuned.append({"shape": name, "bucket": bucket, "tiling": tried[-1]})
    pasted: dict[str, dict[tuple[int, int, int], Tiling]] = {}
    exec(source_of(tuned), {"Tiling": Tiling}, pasted)
    outputs, inputs, _ = SHAPES["8b-tp2-down"]
    assert pasted["TUNED"][BUCKETS[-1], outputs, inputs] == tuned[-1]["tiling"]
