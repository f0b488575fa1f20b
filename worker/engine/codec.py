"""vLLM adapter: decodes a task's payload into vLLM's Request, encodes step outputs as frames."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from coordinator.protocol.wire import decode_frames
from worker.engine.scheduling.handover import go_on, restore, tokens_of
from worker.rank.task_state import RunningState


class ContinuedRequest(Request):
    """A request whose task another group has begun."""

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Return all token ids, the prompt's first."""
        return tokens_of(self)

    def catch_up(self, state: RunningState) -> None:
        """Bring it to a later state of the attempt of which it was made."""
        restore(self, state, self._block_hasher)

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append the tokens of the step that was in flight at its publication."""
        go_on(self, tokens)


class RequestCodec:
    """Decodes payloads; grammar compilation starts here, in vLLM's thread pool."""

    def __init__(
        self, hasher: Callable[..., Any] | None, structured_output: StructuredOutputManager
    ) -> None:
        self._hasher = hasher
        self._structured_output = structured_output
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def request(self, payload: bytes) -> Request:
        """Build a fresh request; raises any error that vLLM finds in it."""
        core_request: EngineCoreRequest = self._decoder.decode(decode_frames(payload))
        request = Request.from_engine_core_request(core_request, self._hasher)
        if request.use_structured_output:
            self._structured_output.grammar_init(request)
        return request

    def continued_request(self, payload: bytes, state: RunningState) -> ContinuedRequest:
        """Build a request that continues where another group left it, with its block hashes."""
        core_request: EngineCoreRequest = self._decoder.decode(decode_frames(payload))
        request: ContinuedRequest = ContinuedRequest.from_engine_core_request(core_request, None)
        restore(request, state, self._hasher)
        if request.use_structured_output:
            self._structured_output.grammar_init(request)
        return request


class OutputCodec:
    """Encodes step outputs as vLLM's engine would; one instance per thread."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()

    def frames(self, outputs: Sequence[EngineCoreOutput]) -> Sequence[bytes]:
        """Return frames that vLLM's front end decodes as the outputs of engine 0."""
        return self._encoder.encode(EngineCoreOutputs(engine_index=0, outputs=list(outputs)))
