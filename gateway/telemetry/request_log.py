"""The log of requests: one line for each answer to a client and each line of a batch.

A line holds numbers, names of the server and codes; of the client's text it holds the request id
alone. It has its own writer, because a line through the general logging costs several times as
much. Called by the edge.
"""

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from coordinator.protocol.log_config import LogConfig, LogFormat
from coordinator.protocol.logs import number_of
from coordinator.protocol.request_line import CONSOLE_WORDS, EVENT
from coordinator.protocol.terms import Tier
from gateway.admission.tiers import tier_name
from gateway.errors import RequestState
from gateway.telemetry.meter import CLIENT_GONE_STATUS

LEVEL = "info"
LOGGER = "gateway.requests"
CLIENT_GONE = "client_gone"
"""Stands for an error code where the client left before its answer was complete."""

KEY_CHARS = 8
"""Characters of a key's hash in the log."""


class RequestLine(msgspec.Struct, omit_defaults=True):
    """One line; what is unknown, or does not apply to the route, is left out."""

    event: str
    level: str
    logger: str
    timestamp: str
    id: str
    method: str
    route: str
    """The route's name, or `other` for a route that does not exist."""
    status: int
    """499: the client left before its answer was complete."""
    tier: str
    duration_s: float
    """From the request's headers to the end of its answer."""
    tenant: str | None = None
    key: str | None = None
    """The first digits of the key's hash."""
    model: str | None = None
    """The name of the served model that the request uses, if it names one."""
    error: str | None = None
    finish: str | None = None
    """The finish reason; several choices may have several, separated by commas."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache."""
    output_tokens: int | None = None
    ttft_s: float | None = None
    """From the request's headers to the first token."""
    queue_s: float | None = None
    """Longest wait for a group."""
    cell: str | None = None
    layout: str | None = None
    """The cell's layout when the stream ended."""
    group: str | None = None
    """The group that computed the last token, such as `tp2`."""
    switches: int | None = None
    """Changes of the cell's layout between the first and the last token."""
    batch: bool = False
    """The request is a line of a batch."""


class Asked(msgspec.Struct, frozen=True):
    """The request, as far as the edge has read it."""

    id: str
    method: str
    route: str
    tenant: str = ""
    key: str = ""
    model: str | None = None
    batch: bool = False


class RequestLog:
    """Writes the lines of one gateway process to stderr."""

    def __init__(
        self,
        config: LogConfig | None = None,
        models: Sequence[str] = (),
        write: Callable[[str], object] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`models` are the served names; no other name is logged."""
        self._models = tuple(models)
        self._write = write or _to_stderr
        self._chance = chance
        self.configure(config or LogConfig(requests=0.0))

    def configure(self, config: LogConfig) -> None:
        """Log by this configuration from now on."""
        is_on = number_of(config.level) <= number_of("info")
        self._share = config.requests if is_on else 0.0
        self._format: LogFormat = config.format

    def note(
        self,
        asked: Asked,
        request: RequestState,
        tier: Tier,
        status: int,
        error: str,
        *,
        began_s: float,
        took_s: float,
    ) -> None:
        """Log an answer that has ended, if it is one of the chosen share.

        `began_s` is the arrival on the clock of the relay, in seconds.
        """
        if self._share <= 0 or (self._share < 1 and self._chance() >= self._share):
            return
        line = RequestLine(
            EVENT,
            LEVEL,
            LOGGER,
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            asked.id,
            asked.method,
            asked.route,
            status,
            tier_name(tier),
            round(took_s, 4),
            asked.tenant or None,
            asked.key[:KEY_CHARS] or None,
            self._model(asked.model),
            error or (CLIENT_GONE if status == CLIENT_GONE_STATUS else None),
            batch=asked.batch,
        )
        if request.prompt_tokens:
            _add_course(line, request, began_s)
        self._write(_text(line, self._format))

    def _model(self, named: str | None) -> str | None:
        """Return the model's name; None for a name that a client made up."""
        return named if named in self._models else None


def _add_course(line: RequestLine, request: RequestState, began_s: float) -> None:
    """Add the course of the request's tasks."""
    line.finish = ",".join(sorted(set(request.finish_reasons))) or None
    line.prompt_tokens = request.prompt_tokens
    line.cached_tokens = request.cached_tokens
    line.output_tokens = request.output_tokens
    if request.first_token_at_s:
        line.ttft_s = round(max(0.0, request.first_token_at_s - began_s), 4)
    if request.queue_wait_ms is not None:
        line.queue_s = request.queue_wait_ms / 1_000
    line.cell = request.cell or None
    line.layout = request.layout or None
    line.group = request.group or None
    line.switches = request.switches


def _text(line: RequestLine, form: LogFormat) -> str:
    if form == "json":
        return msgspec.json.encode(line).decode() + "\n"
    fields = msgspec.to_builtins(line)
    about = " ".join(f"{name}={fields[name]}" for name in list(fields)[4:])
    return f"{line.timestamp} [{line.level:<9}] {CONSOLE_WORDS} {about}\n"


def _to_stderr(text: str) -> None:
    # Nothing depends on the log, so one that cannot be written must not fail an answer.
    with suppress(OSError, ValueError):
        # Looked up at each call: tests and hosts replace it.
        sys.stderr.write(text)
