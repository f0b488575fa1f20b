"""The forms of weights and KV that ranks serve, and the tests of each, for docs/models.md."""

from dataclasses import dataclass

TREES = "unit/worker/test_fp8.py"
BLOCKS = "unit/worker/test_fp8_blocks.py"
EXPERTS = "unit/worker/test_quantized_experts.py"
MODELS = "gpu/test_models.py"
PARTS = "gpu/test_quantized_parts.py"
NO_CPU = "not where ranks view it: vLLM's CPU kernels pack it"
PACKED = "`dp`, with `--widths 1`: its weights are packed"
BY_PART = "`--borrow all` or `none`, a part for each rank"
PASSES = "passes"


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A form, in which modes and where it is served, and the tests that show it.

    `modes` and `parts` are for CUDA: all modes of ranks that hold all weights, and of ranks that
    hold parts (`--weight-parts`). `gpu` says what the test for GPUs has shown.
    """

    name: str
    modes: str
    parts: str
    cpu: str
    cpu_test: str
    gpu_test: str
    gpu: str


FORMS = (
    WeightForm("fp32, bf16, fp16", "all", "yes", "all modes", "integration/test_numerics.py",
               "gpu/test_cuda.py", PASSES),
    WeightForm("fp8, a scale per tensor", "all", "yes", NO_CPU, TREES, "gpu/test_fp8.py", PASSES),
    WeightForm("fp8, a scale per channel", "all", "yes", NO_CPU, TREES,
               "gpu/test_fp8.py", "its products pass"),
    WeightForm("fp8, a scale per block", "all, where no rank's border cuts a block", "yes", NO_CPU,
               BLOCKS, MODELS, PASSES),
    WeightForm("experts in fp8", "all", "yes", NO_CPU, EXPERTS, MODELS, PASSES),
    WeightForm("experts in MXFP4 (gpt-oss)", "all", "`--borrow none`", NO_CPU, EXPERTS, MODELS,
               PASSES),
    WeightForm("AWQ", PACKED, BY_PART, "over parts or with `--widths 1`, with AVX-512",
               "integration/test_quantized_parts.py", PARTS, PASSES),
    WeightForm("GPTQ", PACKED, BY_PART, "over parts or with `--widths 1`, with AVX-512",
               "integration/test_quantized_parts.py", PARTS, PASSES),
    WeightForm("KV in fp8", "all", "yes", "all modes, with AVX-512", "integration/test_fp8_kv.py",
               MODELS, PASSES),
)  # fmt: skip
