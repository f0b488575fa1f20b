"""The outermost ASGI layer: every request passes it before vLLM's app, every answer after it.

It opens only listed routes, identifies the client by its key, bounds requests and bodies, resolves
the tier and passes it to vLLM, names the request, and gives every error OpenAI's shape. It holds a
stream's status line until the first event, so that a request that fails before its first token
still gets a proper status.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.protocol.keys import ApiKey
from coordinator.protocol.terms import Tier
from coordinator.protocol.trace_context import TRACEPARENT_HEADER
from gateway.admission.idempotency import IDEMPOTENCY_HEADER, IN_PROGRESS, StoredAnswer
from gateway.admission.keyring import KeyRing
from gateway.admission.permits import Admission, Refusals
from gateway.admission.rates import RateLimits
from gateway.admission.shared_idempotency import SharedIdempotencyCache
from gateway.admission.shared_storage import SharedStorage, WaitBudget
from gateway.admission.tiers import TIER_HEADER, TierRules, reword_service_tier
from gateway.errors import ApiError, RequestState, api_error, current_request
from gateway.http.answer import Answer, ClientStalledError
from gateway.http.body_check import BodyFacts, check_body
from gateway.http.intake import (
    BufferedBody,
    ClientGoneError,
    RequestHead,
    inner_scope,
    read_body,
    read_head,
)
from gateway.http.line_call import (
    KEY_ID,
    TENANT_KEY,
    LineAnswer,
    LineCall,
    LineProgress,
    line_scope,
    never,
)
from gateway.http.messages_form import API_KEY_HEADER, may_hold_key
from gateway.http.routes import OPEN_PATHS, OTHER_ROUTE, find_route, route_name, takes_no_json
from gateway.http.spans import RequestSpans
from gateway.telemetry.meter import CLIENT_GONE_STATUS, OPERATION_OF_ROUTE, RequestMeter
from gateway.telemetry.request_log import Asked, RequestLog

OFF_LOOP_BYTES = 256 * 1024
"""A larger body is checked in a thread."""

SAME_REQUEST_WAIT_S = 300.0
"""How long a request waits for the answer to an equal one that began before it."""
SAME_REQUEST_PAUSE_S = 0.1
SAME_REQUEST_PAUSE_MAX_S = 1.0
SAME_REQUESTS_MAX = 16
"""Most requests of a tenant that wait so at a gateway; others are refused for now."""

CHECKERS = 2
"""Threads that check large bodies."""

LOGGED_CHARS_MAX = 200

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """The limits of one gateway; see `GatewayConfig`."""

    requests_max: int = 4_096
    body_bytes_max: int = 8 * 1024**2
    media_domains: frozenset[str] = frozenset()
    objectives: Mapping[str, Tier] = field(default_factory=dict)


class Edge:
    """Wraps vLLM's app; `uvicorn` calls it."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing | None = None,
        rates: RateLimits | None = None,
        limits: EdgeLimits | None = None,
        meter: RequestMeter | None = None,
        spans: RequestSpans | None = None,
        replays: SharedIdempotencyCache | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """Without keys the edge accepts every client."""
        self._app = app
        self._keys = keys or KeyRing("")
        self._rates = rates or RateLimits(SharedStorage("memory://"))
        self._limits = limits or EdgeLimits()
        self._meter = meter or RequestMeter()
        self._spans = spans
        self._log = request_log or RequestLog()
        self._admission = Admission(self._limits.requests_max)
        self._refusals = Refusals()
        self._replays = replays or SharedIdempotencyCache(SharedStorage("memory://"))
        # Not the loop's default threads: all of those may be waiting for the disk of batches.
        self._checkers = ThreadPoolExecutor(CHECKERS, thread_name_prefix="body-check")
        self._waiting = Counter[str]()
        self._open = 0
        self.idle = asyncio.Event()
        """Set while no request is being answered; probes do not count."""
        self.idle.set()
        self.draining = False
        """Whether new requests are refused because the process is ending."""

    @property
    def requests(self) -> int:
        """Requests being answered, until their last byte; probes do not count."""
        return self._open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        head = read_head(scope)
        answer = Answer(send, head.request_id, scope["path"], head.answer_id)
        if self._spans is not None and scope["path"] not in OPEN_PATHS:
            traceparent = head.headers.get(TRACEPARENT_HEADER, "")
            answer.span = self._spans.begin(scope, traceparent, head.request_id)
        try:
            error = await self._serve(scope, receive, answer, head)
            if error is not None:
                await answer.refuse(error)
        except (ClientGoneError, ClientStalledError) as gone:
            answer.is_abandoned = True
            log.info("client_lost", request_id=head.request_id, reason=type(gone).__name__)
        except Exception:
            # Catches every bug of ours and of vLLM's: the client gets a 500. Some of vLLM's streams
            # can report a failed task only by raising.
            if answer.request.failure is None:
                path = ascii(scope["path"])[:LOGGED_CHARS_MAX]
                log.exception("request_failed", request_id=head.request_id, path=path)
            await answer.fail()
        finally:
            answer.close()
            if scope["path"] not in OPEN_PATHS:
                self._count(answer, scope["method"], scope["path"], head.is_retry)

    def _count(self, answer: Answer, method: str, path: str, is_retry: bool) -> None:
        status = CLIENT_GONE_STATUS if answer.is_abandoned else answer.status
        route = route_name(method, path)
        self._meter.answered(route, answer.tier, status, answer.error_code, answer.elapsed_s)
        if is_retry:
            self._meter.retried(answer.tier)
        if answer.span is not None:
            answer.span.end(status, answer.error_code, answer.tier, answer.request)
        self._report(answer, method, route, status)

    def _report(
        self, answer: Answer, method: str, route: str, status: int, *, batch: bool = False
    ) -> None:
        """Add an answer that has ended to its tenant's usage, and log it."""
        request = answer.request
        if route in OPERATION_OF_ROUTE and answer.tenant is not None:
            self._meter.tenants.used(answer.tenant, answer.tier, request)
        asked = Asked(
            answer.request_id,
            method if route != OTHER_ROUTE else "other",
            route,
            answer.tenant or "",
            answer.key_id,
            answer.model,
            batch,
        )
        self._log.note(
            asked,
            request,
            answer.tier,
            status,
            answer.error_code,
            began_s=answer.began_s,
            took_s=answer.elapsed_s,
        )

    async def _serve(
        self, scope: Scope, receive: Receive, answer: Answer, head: RequestHead
    ) -> ApiError | None:
        """Pass the request to the app, or return why not."""
        route = scope["method"], scope["path"], scope["raw_path"]
        error = head.check(scope.get("http_version", "1.1")) or find_route(*route)
        if error is not None:
            return error
        if scope["path"] in OPEN_PATHS:
            await self._app(inner_scope(scope, answer, 0), receive, answer.send)
            return None
        own_header = API_KEY_HEADER if may_hold_key(scope["method"], scope["path"]) else ""
        key = await self._keys.identify(head.headers, head.address, own_header)
        if isinstance(key, ApiError):
            return key
        answer.tenant = scope[TENANT_KEY] = key.tenant if key else head.fairness_id()
        answer.key_id = scope[KEY_ID] = key.id if key else ""
        is_post = scope["method"] == "POST"
        if is_post and self.draining:
            return api_error("draining", "This server is shutting down: send the request again.")
        self._open += 1
        self.idle.clear()
        try:
            if not is_post:
                await self._app(inner_scope(scope, answer, 0), receive, answer.send)
                return None
            if takes_no_json(scope["path"]):
                return await self._serve_other(scope, receive, answer, key)
            return await self._serve_body(scope, receive, answer, head, key)
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()

    async def _serve_other(
        self, scope: Scope, receive: Receive, answer: Answer, key: ApiKey | None
    ) -> ApiError | None:
        """Let a route read its body itself; it still counts as a request of the key."""
        answer.tier = Tier.BATCH
        if key is not None:
            admitted = await self._rates.admit(key, 0, answer.wait_budget)
            if isinstance(admitted, ApiError):
                return admitted
            answer.headers = admitted
        await self._app(inner_scope(scope, answer, None), receive, answer.send)
        return None

    async def answer_line(self, call: LineCall) -> LineAnswer:
        """Answer a request of a batch like a client's, in the lowest tier.

        It needs a permit, and the key that made the batch must still be valid and have budget.
        """
        progress = LineProgress()
        answer = Answer(progress.send, uuid.uuid4().hex, call.path)
        answer.tier, answer.tenant = Tier.BATCH, call.tenant
        key = self._keys.of_batch(call.key)
        if isinstance(key, ApiError):
            await answer.refuse(key)
            return progress.answer(answer.request_id)
        answer.key_id = key.id if key else ""
        error = self._admission.take(Tier.BATCH, call.tenant)
        if error is not None:
            await answer.refuse(error)
            return progress.answer(answer.request_id)
        if self._spans is not None:
            answer.span = self._spans.begin_line(call.path)
        try:
            error = await self._run_line(call, answer, key)
            if error is not None:
                await answer.refuse(error)
        except Exception:
            log.exception("request_failed", request_id=answer.request_id, path=call.path)
            await answer.fail()
        finally:
            self._admission.give_back(call.tenant)
            answer.close()
            if answer.span is not None:
                answer.span.end(answer.status, answer.error_code, answer.tier, answer.request)
            self._report(answer, "POST", route_name("POST", call.path), answer.status, batch=True)
        return progress.answer(answer.request_id)

    async def _run_line(
        self, call: LineCall, answer: Answer, key: ApiKey | None
    ) -> ApiError | None:
        if len(call.body) > self._limits.body_bytes_max:
            most = self._limits.body_bytes_max
            return api_error("request_too_large", f"A body may have {most} bytes at most.")
        facts = await self._check(call.body, call.path)
        if isinstance(facts, ApiError):
            return facts
        answer.request = RequestState(call.tenant, call.deadline_ms)
        answer.model = facts.model
        answer.request.grammar_field = facts.grammar_field
        body = reword_service_tier(facts.body, facts.service_tier)
        replay = BufferedBody(body, never, answer.client_gone)
        return await self._run(line_scope(call), replay, answer, key, facts)

    async def _serve_body(
        self, scope: Scope, receive: Receive, answer: Answer, head: RequestHead, key: ApiKey | None
    ) -> ApiError | None:
        """Check the request step by step; the first fault ends it."""
        if head.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return api_error("unsupported_media_type", "The body must be application/json.")
        deadline_ms = head.deadline_ms()
        if isinstance(deadline_ms, ApiError):
            return deadline_ms
        # Before the body is read, only the headers say how urgent the request is.
        rules = self._rules(key)
        tier = rules.resolve(head.headers, None)
        if isinstance(tier, ApiError):
            return tier
        answer.tier = tier
        clock = asyncio.get_running_loop().time
        tenant = scope[TENANT_KEY]
        if TIER_HEADER in head.headers and (full := self._refusals.find(tier, tenant, clock())):
            return full
        if (error := self._admission.take(tier, tenant, key)) is not None:
            return error
        try:
            body = await read_body(receive, head.headers, self._limits.body_bytes_max)
            if isinstance(body, ApiError):
                return body
            facts = await self._check(body, scope["path"])
            if isinstance(facts, ApiError):
                return facts
            resolved = rules.resolve(head.headers, facts.service_tier)
            if isinstance(resolved, ApiError):
                return resolved
            answer.tier = resolved
            if rules.wanted(head.headers, facts.service_tier) != resolved:
                self._meter.clamped(resolved)
            answer.echoes_tier = facts.service_tier is not None
            if (full := self._refusals.find(resolved, tenant, clock())) is not None:
                return full
            answer.request = RequestState(tenant, deadline_ms)
            answer.model = facts.model
            answer.request.grammar_field = facts.grammar_field
            answer.request.give_up = answer.give_up
            body = reword_service_tier(facts.body, facts.service_tier)
            replay = BufferedBody(body, receive, answer.client_gone)
            if IDEMPOTENCY_HEADER in head.headers:
                error = await self._run_once(scope, head, replay, answer, key, facts)
            else:
                error = await self._run(scope, replay, answer, key, facts)
            self._refusals.note(resolved, tenant, answer.request.failure, clock())
            return error
        finally:
            self._admission.give_back(tenant, key)

    async def _run_once(
        self,
        scope: Scope,
        head: RequestHead,
        replay: BufferedBody,
        answer: Answer,
        key: ApiKey | None,
        facts: BodyFacts,
    ) -> ApiError | None:
        """Run a request unless the same one was answered before."""
        name, tenant = head.headers[IDEMPOTENCY_HEADER], scope[TENANT_KEY]
        request = scope["path"].encode() + b"\0" + replay.digest()
        clock = asyncio.get_running_loop().time
        known = await self._replays.begin(tenant, name, request, clock(), answer.wait_budget)
        if _is_in_progress(known) and self._waiting[tenant] < SAME_REQUESTS_MAX:
            self._waiting[tenant] += 1
            try:
                known = await self._wait_for_answer(tenant, name, request, replay, answer)
            finally:
                self._waiting[tenant] -= 1
                self._waiting += Counter()  # Drops tenants without one.
        if isinstance(known, ApiError):
            return known
        if known is not None:
            await answer.repeat(known)
            return None
        try:
            return await self._run(scope, replay, answer, key, facts)
        finally:
            await self._replays.end(tenant, name, answer.stored, clock(), answer.wait_budget)

    async def _wait_for_answer(
        self, tenant: str, name: str, request: bytes, replay: BufferedBody, answer: Answer
    ) -> StoredAnswer | ApiError | None:
        """Ask again until an equal request has its answer, or this one has no time left."""
        clock = asyncio.get_running_loop().time
        limit_s = answer.request.deadline_ms / 1_000 or SAME_REQUEST_WAIT_S
        until_s, pause_s = clock() + min(limit_s, SAME_REQUEST_WAIT_S), SAME_REQUEST_PAUSE_S
        while True:
            if await replay.wait_for_leave(pause_s):
                raise ClientGoneError
            known = await self._replays.begin(tenant, name, request, clock(), WaitBudget())
            if not _is_in_progress(known) or self.draining or clock() > until_s:
                return known
            pause_s = min(2 * pause_s, SAME_REQUEST_PAUSE_MAX_S)

    async def _check(self, body: bytes, path: str) -> BodyFacts | ApiError:
        work = partial(check_body, body, self._limits.media_domains, path)
        if len(body) <= OFF_LOOP_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._checkers, work)

    async def _run(
        self,
        scope: Scope,
        replay: BufferedBody,
        answer: Answer,
        key: ApiKey | None,
        facts: BodyFacts,
    ) -> ApiError | None:
        if key is not None:
            estimate = facts.prompt_tokens_estimate
            admitted = await self._rates.admit(key, estimate, answer.wait_budget)
            if isinstance(admitted, ApiError):
                return admitted
            answer.headers = admitted
        if answer.span is not None:
            answer.request.trace = answer.span.traceparent
        token = current_request.set(answer.request)
        try:
            await self._app(inner_scope(scope, answer, replay.length), replay, answer.send)
        finally:
            current_request.reset(token)
            await answer.request.close()
            if key is not None:
                tokens = answer.request.generated_tokens
                await self._rates.charge(key, tokens, answer.wait_budget)
        return None

    def _rules(self, key: ApiKey | None) -> TierRules:
        if key is None:
            return TierRules(objectives=self._limits.objectives)
        highest, default = Tier[key.max_tier.upper()], Tier[key.default_tier.upper()]
        return TierRules(highest, max(highest, default), self._limits.objectives)


_JSON = "application/json"


def _is_in_progress(known: StoredAnswer | ApiError | None) -> bool:
    return isinstance(known, ApiError) and known.code == IN_PROGRESS
