"""vLLM adapter: the new tasks of a step as a leader sends them to its followers.

After a switch all tasks of a group are new in its first step, and all streams wait for it. So a
message has columns instead of an object for each task. Token ids go into one array. Of sampling
parameters it has one task's in full, and of all others what differs: vLLM checks parameters that
are made anew, but not copies, and copies are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

Tokens = npt.NDArray[np.int32]
TokenIds = list[int] | Tokens
"""Token ids as vLLM has them, or as followers get them."""

_Sizes = tuple[int, int, int]
"""Sizes of the prompt, the generated tokens and prefill_token_ids; -1 is None."""

_WHOLE = -2
"""As the last size: prefill_token_ids are the prompt and the generated tokens."""

_COLUMNS = (
    *("req_id", "prompt_token_ids", "prefill_token_ids"),
    *("sampling_params", "block_ids", "num_computed_tokens"),
)
_RARE = tuple(each.name for each in fields(NewRequestData) if each.name not in _COLUMNS)
"""Fields that a task of text leaves as they are in `_bare`."""

Changes = dict[str, Any] | None
"""What a task's parameters have other than those sent in full; None: it has no parameters."""


@dataclass(slots=True)
class NewTasks:
    """New tasks, column by column."""

    names: list[str]
    sizes: list[_Sizes]
    tokens: Tokens
    blocks: list[tuple[list[int], ...]]
    computed: list[int]
    params: SamplingParams | None
    """The parameters of one task."""
    changes: list[Changes]
    rare: dict[int, tuple[Any, ...]]
    """The rare fields of the tasks, by place, that have some."""

    @classmethod
    def of(
        cls,
        tasks: Sequence[NewRequestData],
        resuming: Mapping[str, TokenIds],
        known: Mapping[str, Tokens],
    ) -> "NewTasks":
        """Pack tasks with the tokens that they already have; `known` are all of a task's, or none.

        Of a task whose array is known no list is read.
        """
        pieces: list[Tokens] = [np.zeros(0, dtype=np.int32)]
        sizes = [_pack(each, resuming, known, pieces) for each in tasks]
        params = next((p for each in tasks if (p := each.sampling_params) is not None), None)
        rare = {n: found for n, each in enumerate(tasks) if (found := _rare(each)) != _USUAL}
        return cls(
            [each.req_id for each in tasks],
            sizes,
            np.concatenate(pieces),
            [each.block_ids for each in tasks],
            [each.num_computed_tokens for each in tasks],
            params,
            [_changes(params, each.sampling_params) for each in tasks],
            rare,
        )

    def unpacked(self) -> tuple[list[NewRequestData], dict[str, TokenIds]]:
        """Return the tasks, and the tokens that they already have, as arrays."""
        tasks: list[NewRequestData] = []
        resuming: dict[str, TokenIds] = {}
        tokens, at = self.tokens, 0
        columns = zip(self.names, self.sizes, self.blocks, self.computed, self.changes, strict=True)
        for name, (asked, generated, given), blocks, computed, changes in columns:
            task = _bare(name, blocks, computed)
            start = at
            if asked >= 0:
                at += asked
                task.prompt_token_ids = tokens[start:at]
            if generated >= 0:
                resuming[name] = tokens[at : at + generated]
                at += generated
            if given >= 0:
                task.prefill_token_ids = tokens[at : at + given]
                at += given
            elif given == _WHOLE:
                task.prefill_token_ids = tokens[start:at]
            if changes is not None:
                task.sampling_params = params = copy(self.params)
                for field, value in changes.items():
                    setattr(params, field, value)
            tasks.append(task)
        for place, values in self.rare.items():
            for field, value in zip(_RARE, values, strict=True):
                setattr(tasks[place], field, value)
        return tasks, resuming


def _pack(
    task: NewRequestData,
    resuming: Mapping[str, TokenIds],
    known: Mapping[str, Tokens],
    pieces: list[Tokens],
) -> _Sizes:
    """Add a task's token ids to the pieces: prompt, generated tokens, and prefill_token_ids."""
    asked, given = task.prompt_token_ids, task.prefill_token_ids
    generated, whole = resuming.get(task.req_id), known.get(task.req_id)
    sizes = [-1 if ids is None else len(ids) for ids in (asked, generated, given)]
    size = max(sizes[0], 0) + max(sizes[1], 0)
    if asked is not None and sizes[2] == size:
        # prefill_token_ids are just the prompt and the generated tokens.
        given, sizes[2] = None, _WHOLE
    if whole is not None and whole.size == size:
        asked, generated = None, None
        pieces.append(whole)
    pieces += [np.asarray(ids, np.int32) for ids in (asked, generated, given) if ids is not None]
    return sizes[0], sizes[1], sizes[2]


def _changes(params: SamplingParams | None, own: SamplingParams | None) -> Changes:
    if params is None or own is None:
        return None
    if own == params:
        return {}
    names: tuple[str, ...] = own.__struct_fields__
    return {name: value for name in names if (value := getattr(own, name)) != getattr(params, name)}


def _bare(name: str, blocks: tuple[list[int], ...], computed: int) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=None,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=blocks,
        num_computed_tokens=computed,
        lora_request=None,
    )


_rare: Callable[[NewRequestData], tuple[Any, ...]] = attrgetter(*_RARE)
_USUAL = _rare(_bare("", (), 0))
