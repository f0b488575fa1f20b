"""vLLM adapter: what model runner V2 does more in a pipeline stage: activations and tokens.

vLLM's worker sends activations by NCCL, and the last stage broadcasts sampled tokens to the others,
which count in which step they need them. Here both travel over links that can be aborted. Tokens
also come with steps, which suffices wherever nothing is in flight: so nothing of a formation
outlives it, and groups can be left and formed at any step.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import compute_need_sampled_mask
from vllm.v1.worker.gpu.states import RequestState

from comm_pool.stages.links import LinkEnd, StageLinks
from worker.engine.runners.stage_link import stream_of


class Sampled(NamedTuple):
    """What a step has sampled for rows of the runner, on its way from the last stage."""

    number: int
    """Of the step."""
    rows: npt.NDArray[np.int32]
    generations: npt.NDArray[np.int32]
    """Of the rows: a later one belongs to another task."""
    positions: npt.NDArray[np.int32]
    """Of the tokens in their tasks; -1 where the step samples none."""


AHEAD_STEPS_MAX = 4
"""After how many steps a message is taken in anyway, so that the link always has room."""


class StepTokens:
    """Takes the place of vLLM's `PPHandler`: brings sampled tokens to the first stage.

    A token comes with the step that needs it where the leader's host had it when it planned that
    step. If not, the last stage's device sends it over a link, one message for each step that
    samples. A row counts the tokens that it has, so none is taken twice, whichever way is faster.
    Stages between first and last read no tokens, and count them.
    """

    def __init__(
        self,
        states: RequestState,
        device: torch.device,
        update: Callable[..., None],
        link: LinkEnd | None,
        *,
        is_last: bool,
    ) -> None:
        """`update` is the runner's `postprocess_sampled`; `link` is None between both ends."""
        self._states, self._device, self._is_last = states, device, is_last
        self._update, self._link = update, link
        rows = len(states.prefill_len.np)
        self._taken = np.zeros(rows, dtype=np.int32)
        """Tokens of each row that were sampled and taken in."""
        self._generations = np.zeros(rows, dtype=np.int32)
        self._sampled: deque[Sampled] = deque()
        self._formation = self._number = 0
        self._given: dict[str, torch.Tensor] | None = None
        self._is_linked = False
        """Whether the step of now sends tokens: vLLM's warm-up does not."""

    def take(self, step: SchedulerOutput) -> None:
        """Prepare the update of rows that a step needs; the last stage has sampled it itself."""
        self._is_linked = self._link is not None
        if self._is_last:
            return
        if self._link is not None and self._link.formation != self._formation:
            # The host knows by now what is still on its way, or it is void.
            self._formation = self._link.formation
            self._sampled.clear()
        self._number += 1
        # Their rows may get other tasks in this step, whose tokens the host may write at once.
        for req_id in step.finished_req_ids | (step.preempted_req_ids or set()):
            if (row := self._states.req_id_to_index.get(req_id)) is not None:
                self._generations[row] += 1
        rows: list[int] = []
        tokens: list[int] = []
        missing: list[int] = []
        cached, states = step.scheduled_cached_reqs, self._states
        # vLLM's warm-up gives none.
        given = zip(cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=False)
        for req_id, computed, ids in given:
            row = states.req_id_to_index[req_id]
            known = int(states.prefill_len.np[row] + self._taken[row])
            if computed < known:
                continue  # It has this token: it came with the task, or before.
            assert computed == known, f"{req_id} lacks more than one token."
            if ids:
                rows.append(row)
                tokens.append(ids[-1])
            else:
                missing.append(row)
        if self._link is None:
            rows, tokens, missing = rows + missing, tokens + [0] * len(missing), []
        updates = []
        if rows:
            # First, so that messages with the same tokens bring nothing new.
            self._taken[rows] += 1
            updates.append(self._of_rows(rows, tokens))
        updates += self._received(missing)
        for each in updates[:-1]:
            self._update(**each)
        self._given = updates[-1] if updates else None

    def _received(self, missing: Collection[int]) -> list[dict[str, torch.Tensor]]:
        """Let the device wait for messages: all until these rows have theirs, and old ones."""
        waits, updates = set(missing), []
        while self._sampled:
            if not waits and self._number - self._sampled[0].number < AHEAD_STEPS_MAX:
                break
            sampled = self._sampled.popleft()
            known = self._states.prefill_len.np[sampled.rows] + self._taken[sampled.rows]
            is_new = (sampled.positions == known) & (
                self._generations[sampled.rows] == sampled.generations
            )
            self._taken[sampled.rows[is_new]] += 1
            waits.difference_update(sampled.rows[is_new].tolist())
            updates.append(self._message(np.where(is_new, sampled.rows, -1)))
        assert not waits, "no step in flight samples what a step needs."
        return updates

    def _message(self, rows: npt.NDArray[np.int32]) -> dict[str, torch.Tensor]:
        """Receive one message; rows of -1 are left as they are."""
        assert self._link is not None
        main, stream = torch.cuda.current_stream(), stream_of(self._link)
        with torch.cuda.stream(stream):
            tokens = torch.empty((rows.size, 1), dtype=torch.int64, device=self._device)
            self._link.receive([tokens])
        main.wait_stream(stream)
        tokens.record_stream(main)
        return self._update_of(tokens, rows)

    def warm(self) -> None:
        """Let vLLM's update of a row compile before there are tasks: its own warm-up does not."""
        if not self._is_last:
            self._update(**self._of_rows([0], [0]))

    def _of_rows(self, rows: list[int], tokens: list[int]) -> dict[str, torch.Tensor]:
        ids = np.asarray(tokens, dtype=np.int64).reshape(len(rows), 1)
        sampled = async_tensor_h2d(ids, device=self._device)
        return self._update_of(sampled, np.asarray(rows, dtype=np.int32))

    def _update_of(
        self, tokens: torch.Tensor, rows: npt.NDArray[np.int32]
    ) -> dict[str, torch.Tensor]:
        """Return what vLLM's `postprocess_sampled` takes."""
        return {
            "sampled_tokens": tokens,
            "num_sampled": torch.ones(rows.size, dtype=torch.int32, device=self._device),
            "num_rejected": torch.zeros(rows.size, dtype=torch.int32, device=self._device),
            "idx_mapping": async_tensor_h2d(rows, device=self._device),
        }

    def get_prev_sampled_outputs(self, *_: Any) -> dict[str, torch.Tensor] | None:
        """Return the update of the step that begins; vLLM asks once in each."""
        given, self._given = self._given, None
        return given

    def receive(self, batch: InputBatch) -> bool:
        """Note what a step samples; return whether it is for all of its tasks."""
        mask = compute_need_sampled_mask(batch)
        if mask is None:
            return False
        if self._is_linked:
            rows = np.array(batch.idx_mapping_np, dtype=np.int32)
            after = batch.num_computed_tokens_np + batch.num_scheduled_tokens
            positions = np.where(mask, after, -1).astype(np.int32)
            self._sampled.append(Sampled(self._number, rows, self._generations[rows], positions))
        return bool(mask.all())

    def broadcast(
        self, sampled: torch.Tensor, _: torch.Tensor, __: torch.Tensor, batch: InputBatch
    ) -> None:
        """Send the first stage what a step has sampled; nothing where no later step needs it."""
        if not self._is_linked or compute_need_sampled_mask(batch) is None:
            return
        assert self._link is not None
        assert sampled.dtype == torch.int64 and sampled.shape == (batch.num_reqs, 1)
        main, stream = torch.cuda.current_stream(), stream_of(self._link)
        tokens = sampled.contiguous()
        stream.wait_stream(main)
        self._link.send([tokens])
        tokens.record_stream(stream)

    def on_req_idx_freed(self, row: int) -> None:
        """Let what is on its way to a row be void: it may get another task."""
        self._generations[row] += 1
        self._taken[row] = 0

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
