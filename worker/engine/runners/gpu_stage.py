"""vLLM adapter: what model runner V2 does more in a pipeline stage: activations and tokens.

vLLM's worker sends activations by NCCL, and the last stage broadcasts sampled tokens to the others,
which count in which step they need them. Here activations travel over links that can be aborted,
and the leader, which has the last stage, writes a task's last token into the step that computes it.
So nothing of a step outlives it, and groups can be left and formed at any step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.states import RequestState

from comm_pool.stages.links import StageLinks
from worker.engine.runners.stage_link import stream_of


class StepTokens:
    """Takes the place of vLLM's `PPHandler`: sampled tokens come with the steps that need them."""

    def __init__(self, states: RequestState, device: torch.device, *, is_last: bool) -> None:
        self._states, self._device, self._is_last = states, device, is_last
        self._taken: dict[str, torch.Tensor] | None = None

    def take(self, step: SchedulerOutput) -> None:
        """Remember the tokens that tasks of a step have sampled last; the last stage has them."""
        if self._is_last:
            return
        cached, states = step.scheduled_cached_reqs, self._states
        rows: list[int] = []
        tokens: list[int] = []
        # vLLM's warm-up gives none.
        given = zip(cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=False)
        for req_id, computed, ids in given:
            row = states.req_id_to_index[req_id]
            # Before that, the tokens are those that the task came with.
            if ids and computed >= states.prefill_len.np[row]:
                rows.append(row)
                tokens.append(ids[-1])
        self._taken = self._of_rows(rows, tokens) if rows else None

    def warm(self, update: Callable[..., None]) -> None:
        """Let vLLM's update of a row compile before there are tasks: its own warm-up does not."""
        if not self._is_last:
            update(**self._of_rows([0], [0]))

    def _of_rows(self, rows: list[int], tokens: list[int]) -> dict[str, torch.Tensor]:
        """Return what vLLM's `postprocess_sampled` takes."""
        count, device = len(rows), self._device
        ids = np.asarray(tokens, dtype=np.int64).reshape(count, 1)
        return {
            "sampled_tokens": async_tensor_h2d(ids, device=device),
            "num_sampled": torch.ones(count, dtype=torch.int32, device=device),
            "num_rejected": torch.zeros(count, dtype=torch.int32, device=device),
            "idx_mapping": async_tensor_h2d(np.asarray(rows, dtype=np.int32), device=device),
        }

    def get_prev_sampled_outputs(self, *_: Any) -> dict[str, torch.Tensor] | None:
        """Return the tokens of the step that begins; vLLM asks once in each."""
        taken, self._taken = self._taken, None
        return taken

    def receive(self, _: Any) -> bool:
        """Return whether all tasks of the step decode next; nothing has to be received."""
        return True

    def broadcast(self, *_: Any) -> None:
        """Send nothing."""

    def on_req_idx_freed(self, _: int) -> None:
        """Forget nothing: no token is kept from one step to a later one."""

    def relay_aux_hidden_states(self, _: Any, output: IntermediateTensors) -> IntermediateTensors:
        """Return the activations: speculation, whose states these would be, is refused."""
        return output


class StageTraffic:
    """Receives and sends the activations of a stage's steps, beside the steps before and after."""

    def __init__(self, links: StageLinks, first: IntermediateTensors | None) -> None:
        """`first` are the buffers that graphs read, of as many rows as a step has at most.

        Longer steps than those of graphs use it and a second one by turns, so that the next step's
        activations arrive while one computes.
        """
        self._before, self._after = links.before, links.after
        self._buffers: tuple[IntermediateTensors, ...] = ()
        if self._before is not None:
            assert first is not None
            self._buffers = first, IntermediateTensors.empty_like(first)
        self._free: list[torch.cuda.Event | None] = [None, None]
        """After which event each buffer may be written again."""
        self._turn = 0
        self._sending: torch.cuda.Event | None = None
        """The copy of activations that the next graph would overwrite."""

    def begin(self, tokens: int, *, is_graphed: bool) -> IntermediateTensors | None:
        """Let a step wait for its activations; return the buffers in which they will be."""
        main = torch.cuda.current_stream()
        if self._sending is not None:
            main.wait_event(self._sending)
            self._sending = None
        if self._before is None or not tokens:
            return None
        self._turn = 0 if is_graphed else 1 - self._turn
        buffers, free = self._buffers[self._turn], self._free[self._turn]
        stream = stream_of(self._before)
        if free is not None:
            stream.wait_event(free)
        self._before.receive(_rows(buffers, tokens))
        main.wait_stream(stream)
        return buffers

    def end(self, output: IntermediateTensors | None, tokens: int, *, is_reused: bool) -> None:
        """Send what a step gives the next stage, once it is computed.

        `is_reused`: the next graph writes there.
        """
        stream = torch.cuda.current_stream()
        if output is not None:
            assert self._after is not None
            main, stream = stream, stream_of(self._after)
            stream.wait_stream(main)
            rows = _rows(output, tokens)
            self._after.send(rows)
            for each in rows:
                each.record_stream(stream)
            if is_reused:
                self._sending = stream.record_event()
        # Sent tensors may lie in the buffers of those received.
        self._free[self._turn] = stream.record_event()


def _rows(tensors: IntermediateTensors, count: int) -> list[torch.Tensor]:
    """Return the first rows of each tensor, in the same order in all stages."""
    return [tensors[name][:count] for name in sorted(tensors.tensors)]
