"""Any of the tests' checkpoints by its name: tiny models, quantized ones, and gpt-oss."""

from pathlib import Path

from tests.harness.vllm.mxfp4_models import write_gpt_oss
from tests.harness.vllm.quantized_models import CONFIGS, write_quantized
from tests.harness.vllm.tiny_models import model_of


def checkpoint(name: str, folder: Path) -> Path:
    """Write the model of this name, and return its folder."""
    if name == "gpt-oss":
        return write_gpt_oss(folder)[0]
    return write_quantized(folder, name)[0] if name in CONFIGS else model_of(name, folder)
