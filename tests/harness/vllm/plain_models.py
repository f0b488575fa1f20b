"""Models as transformers builds them, also where vLLM has built the same classes before."""

import sys
from contextlib import ExitStack
from typing import Any

from transformers import AutoModelForCausalLM

from tests.harness.cells.servers import MODEL

CHANGER = "vllm.model_executor.models.transformers.base"


def build_plain(config: Any) -> Any:
    """The random model of a transformers configuration.

    vLLM serves some families with transformers' own classes and changes these
    classes in place: they ask for a configuration of vLLM from then on, also
    where a test builds them without vLLM.
    """
    with ExitStack() as stack:
        if CHANGER in sys.modules:
            from vllm.config import set_current_vllm_config

            from tests.harness.vllm.part_trees import base_config

            stack.enter_context(set_current_vllm_config(base_config(MODEL)))
        return AutoModelForCausalLM.from_config(config)
