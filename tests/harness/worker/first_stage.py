"""The first stage of a pipeline group, as far as it takes in tokens: the product's own rules."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from comm_pool.stages.links import LinkEnd
from worker.engine.runners.gpu_stage import StepTokens

ROWS = 80


class FirstStage:
    """Takes tokens in as the first stage does, in rows; a token is the number of those before it.

    The last stage's messages come at once: only their order matters.
    """

    formation = 1
    """As its link has it."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.np = np.zeros(ROWS, dtype=np.int32)
        self.prefill_len = self
        self._have: list[list[int]] = [[] for _ in range(ROWS)]
        """The tokens of each row."""
        self.messages: deque[list[int]] = deque()
        self.longest = self.received = self.listed = 0
        states, link = cast(RequestState, self), cast(LinkEnd, self)
        device = torch.device("cpu")
        self._tokens = StepTokens(states, device, self._update, link, is_last=False)
        self._tokens._message = self._message  # type: ignore[method-assign]

    def enter(self) -> None:
        """Form the group again: the ring of messages begins anew."""
        self.formation += 1
        self.messages.clear()

    def begin(self, step: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Do what the runner does with a step, in its order."""
        self.listed += sum(map(len, step.scheduled_cached_reqs.new_token_ids))
        self._tokens.take(step)
        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            self._free(name)
        if (update := self._tokens.get_prev_sampled_outputs(None)) is not None:
            self._update(**update)
        for new in step.scheduled_new_reqs:
            self._free(new.req_id)
            row = next(each for each in range(ROWS) if each not in self.req_id_to_index.values())
            self.req_id_to_index[new.req_id] = row
            self._have[row] = list(new.prefill_token_ids or ())
            self.np[row] = len(self._have[row])
        if not step.total_num_scheduled_tokens:
            return
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
        names = list(step.num_scheduled_tokens)
        for name in names:
            have, first = self._have[self.req_id_to_index[name]], computed[name]
            assert len(have) >= first + step.num_scheduled_tokens[name], f"{name} lacks a token"
            if name in cached.req_ids and first >= self.np[self.req_id_to_index[name]]:
                assert have[first] == first, f"{name} has another token"
        rows = [self.req_id_to_index[name] for name in names]
        batch = SimpleNamespace(
            idx_mapping_np=np.array(rows, dtype=np.int32),
            num_computed_tokens_np=np.array([computed[name] for name in names]),
            num_scheduled_tokens=np.array(list(step.num_scheduled_tokens.values())),
            prefill_len_np=self.np[rows],
            max_seq_len_np=None,
        )
        self._tokens.receive(cast(InputBatch, batch))
        if any(sampled[name] for name in names):
            self.messages.append([*(sampled[name][0] if sampled[name] else -7 for name in names)])
            self.longest = max(self.longest, len(self.messages))

    def _free(self, name: str) -> None:
        if (row := self.req_id_to_index.pop(name, None)) is not None:
            self._tokens.on_req_idx_freed(row)

    def _message(self, rows: npt.NDArray[np.int32]) -> dict[str, torch.Tensor]:
        self.received += 1
        return self._tokens._update_of(torch.tensor(self.messages.popleft())[:, None], rows)

    def _update(self, sampled_tokens: torch.Tensor, idx_mapping: torch.Tensor, **_: Any) -> None:
        for row, (token,) in zip(idx_mapping.tolist(), sampled_tokens.tolist(), strict=True):
            if row >= 0:
                self._have[row].append(token)
