"""vLLM adapter: runs the probe as steps of requests for prompt log-probabilities.

The steps look like a scheduler's, but no scheduler knows of them. Each text runs alone, at a safe
point, and its KV goes to vLLM's null block, which no task reads. So the probe needs no page, leaves
the prefix cache alone, and does not change waiting or running tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from comm_pool.layout import StepMode
from worker.engine.probe import error_max_nats, probe_texts
from worker.engine.scheduling.step_plan import StepPlan
from worker.rank.inflight_step import InflightStep

NULL_BLOCK = 0
"""It stands for blocks outside a window; every slot table maps it to itself."""


@dataclass(frozen=True, slots=True)
class ProbeBatch:
    """The probe texts of one model, and the error limit for its modes."""

    texts: tuple[tuple[int, ...], ...]
    error_max_nats: float

    @classmethod
    def of(cls, config: VllmConfig, tokens_per_slot: int) -> "ProbeBatch":
        """Make the probe of a model whose KV blocks hold `tokens_per_slot` tokens."""
        model = config.model_config
        # The token sampled after a text must fit into the model's context too.
        length = min(tokens_per_slot, model.max_model_len - 1)
        length = min(length, config.scheduler_config.max_num_batched_tokens)
        dtype = str(model.dtype).removeprefix("torch.")
        # Numbers of fp8 are rounded to their neighbours where sums have another order.
        has_fp8_kv = is_quantized_kv_cache(config.cache_config.cache_dtype)
        is_quantized = config.quant_config is not None or has_fp8_kv
        limit = error_max_nats(dtype, is_quantized=is_quantized, has_experts=model.is_moe)
        return cls(probe_texts(model.get_vocab_size(), length), limit)

    def run(self, execute: Callable[[StepPlan], Any], mode: StepMode) -> tuple[float, ...]:
        """Compute all texts in one mode; `execute` runs a step on all ranks of the group.

        Returns the log-probability of each token after a text's first, in nats.
        """
        values: list[float] = []
        before: set[str] = set()
        for number, text in enumerate(self.texts):
            name = f"aileron-probe-{number}"
            plan = StepPlan(_step_of(name, text, before), None, mode=mode)
            values += _log_probabilities(InflightStep(plan, execute(plan)).tokens(), name)
            before = {name}
        last = SchedulerOutput.make_empty()
        last.finished_req_ids = before
        execute(StepPlan(last, None, mode=mode))
        return tuple(values)


def _step_of(name: str, text: tuple[int, ...], finished: set[str]) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=list(text),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            pooling_params=None,
            block_ids=([NULL_BLOCK],),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=list(text),
        )
    ]
    step.num_scheduled_tokens = {name: len(text)}
    step.total_num_scheduled_tokens = len(text)
    step.finished_req_ids = finished
    return step


def _log_probabilities(result: Any, name: str) -> list[float]:
    """Return the log-probabilities of the prompt's tokens; empty if the output has none."""
    prompt_logprobs = (result.prompt_logprobs_dict or {}).get(name)
    return [] if prompt_logprobs is None else prompt_logprobs.logprobs[:, 0].tolist()
