"""The admin API: the state of the cell, and the request to change its layout.

Answers come from the core's views. The API checks a wanted layout, posts it to the core actor
and, on request, waits until it serves. Errors have OpenAI's shape. Runs on the actor's event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr
from starlette.exceptions import HTTPException
from starlette.routing import Match

from comm_pool.layout import Layout, LayoutError, Rank, format_layout, parse_layout
from comm_pool.plan import communicator_plan
from coordinator.admin.access import AdminGuard, error_answer
from coordinator.admin.actions import logged_action
from coordinator.admin.answer_error import AnswerError
from coordinator.admin.key import AdminKeys
from coordinator.admin.page import page
from coordinator.admin.usage import usage_view
from coordinator.core.core import OPERATOR, Core
from coordinator.model.events import ReinstateMode, RenewalWanted, SwitchWanted
from coordinator.protocol.config import ConfigError
from coordinator.protocol.config_file import RestartNeededError
from coordinator.protocol.terms import Carry
from coordinator.server.config_reload import ConfigReload
from coordinator.server.core_actor import CoreActor
from coordinator.telemetry.history import History
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.usage_history import By, UsageHistory

WAIT_LIMIT_S = 120.0
"""How long `?wait=1` waits for a layout to serve."""
WAIT_POLL_S = 0.005
HISTORY_MAX = 1_000
"""Switches or decisions in one answer, at most."""
LIVE_SWITCHES = 100
"""Switches that the live page shows."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Last = Annotated[int, Query(ge=1, le=HISTORY_MAX)]
LastPeriods = Annotated[int | None, Query(ge=1, le=HISTORY_MAX)]
TenantName = Annotated[str | None, Query(max_length=64)]


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The sources of the API's answers; `/admin/status` shows `facts` as they are."""

    core: Core
    owner: CoreActor
    metrics: Metrics
    history: History
    clock: Callable[[], int]
    world: int
    widths: tuple[int, ...]
    default_carry: Carry
    facts: dict[str, Any]
    usage: UsageHistory = field(default_factory=lambda: UsageHistory(1, 1))
    """The usage of tenants since `started_s`, which is in Unix seconds."""
    started_s: float = field(default_factory=time.time)
    reload: ConfigReload | None = None
    """The configuration's file; None if there is none."""


class SwitchBody(BaseModel):
    """Body of `POST /admin/layout`."""

    model_config = ConfigDict(extra="forbid")

    layout: StrictStr
    carry: StrictStr | None = None


class RenewBody(BaseModel):
    """Body of `POST /admin/renew`; no ranks means all ranks."""

    model_config = ConfigDict(extra="forbid")

    ranks: list[StrictInt] = []


class PutBackBody(BaseModel):
    """Body of `POST /admin/put-back`."""

    model_config = ConfigDict(extra="forbid")

    mode: StrictStr


def build_admin(context: AdminContext, keys: AdminKeys) -> AdminGuard:
    """Return the ASGI application of the admin port; there may be no keys on loopback."""
    app = FastAPI(title="aileron admin", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(AnswerError, _on_answer_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_reads(app, context)

    @app.post("/admin/layout")
    async def change_layout(
        request: Request, body: SwitchBody, wait: bool = False
    ) -> dict[str, Any]:
        with logged_action(request, "layout", layout=body.layout, carry=body.carry):
            return await _switch(context, body, wait=wait)

    @app.post("/admin/put-back")
    async def put_back(request: Request, body: PutBackBody) -> dict[str, Any]:
        with logged_action(request, "put-back", mode=body.mode):
            return await _put_back(context, body.mode)

    @app.post("/admin/renew")
    async def renew(request: Request, body: RenewBody | None = None) -> dict[str, Any]:
        ranks = body.ranks if body is not None else []
        with logged_action(request, "renew", ranks=ranks):
            return await _renew(context, ranks)

    @app.post("/admin/reload")
    async def reload(request: Request) -> dict[str, Any]:
        with logged_action(request, "reload"):
            return await _reload(context)

    return AdminGuard(app, keys)


def _add_reads(app: FastAPI, context: AdminContext) -> None:
    core, clock = context.core, context.clock

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=METRICS_TYPE)

    @app.get("/admin/layout")
    async def layout() -> dict[str, Any]:
        return core.views.layout()

    @app.get("/admin/ranks")
    async def ranks() -> dict[str, Any]:
        return core.views.ranks(clock())

    @app.get("/admin/switches")
    async def switches(last: Last = 20) -> dict[str, Any]:
        return {"switches": _switches(context, last)}

    @app.get("/admin/decisions")
    async def decisions(last: Last = 20) -> dict[str, Any]:
        decisions: Any = core.views.decisions(last)["decisions"]
        views = _of_day(_of_day(decisions, "time", clock()), "since", clock())
        more = {"alternation": core.views.alternation(), **core.views.step_times()}
        return {"decisions": views, **more}

    @app.get("/admin/status")
    async def status() -> dict[str, Any]:
        return {
            **context.facts,
            "config": None if context.reload is None else context.reload.view(),
            "gateways": len(context.owner.gateway_outboxes),
            "gateway_files": gateway_files_view(context.owner),
            **core.views.layout(),
            **core.views.ranks(clock()),
            "queue": core.views.queue(),
            "batches": batches_view(context.owner),
            "switches": _switches(context, 1),
        }

    @app.get("/admin/usage")
    async def usage(
        by: By = "day", last: LastPeriods = None, tenant: TenantName = None
    ) -> dict[str, Any]:
        return usage_view(context.usage, context.started_s, by, last, tenant)

    @app.get("/")
    async def live_page() -> Response:
        return page()

    @app.get("/admin/live")
    async def live(after: Annotated[int, Query(ge=0)] = 0) -> dict[str, Any]:
        return {
            **context.facts,
            "gateways": len(context.owner.gateway_outboxes),
            "world": context.world,
            "widths": context.widths,
            **core.views.layout(),
            **core.views.ranks(clock()),
            "queue": core.views.queue(),
            "switches": _switches(context, LIVE_SWITCHES),
            "samples": context.history.after(after),
        }


def batches_view(owner: CoreActor) -> list[dict[str, Any]]:
    """Return the running batches, each with the gateway that runs it."""
    return [
        {"gateway": gateway, **msgspec.to_builtins(batch)}
        for gateway, batches in owner.batches.items()
        if gateway in owner.gateway_outboxes
        for batch in batches
    ]


def gateway_files_view(owner: CoreActor) -> list[dict[str, Any]]:
    """Return what each gateway says of its configuration and its file of keys."""
    return [
        {
            "gateway": gateway,
            "config": files.config_hash,
            "config_refusal": files.config_refusal or None,
            "keys_refusal": files.keys_refusal or None,
        }
        for gateway, files in owner.gateway_files.items()
        if gateway in owner.gateway_outboxes
    ]


async def _switch(context: AdminContext, body: SwitchBody, *, wait: bool) -> dict[str, Any]:
    asked_ms = context.clock()
    core = context.core
    layout, carry = _read_wanted(context, body)
    if core.views.is_recovering:
        raise AnswerError(
            503, "recovering", _sentence(core.why_unreachable(layout) or "try again.")
        )
    if (reason := core.why_unreachable(layout)) is not None:
        raise AnswerError(400, "invalid_value", _sentence(reason), "layout")
    wanted = format_layout(layout, context.world)
    await context.owner.post(SwitchWanted(layout, carry, OPERATOR, asked_ms))
    _require_target(core, wanted)
    if wait:
        await _until_serving(core, wanted)
        await context.owner.settled()
    answer = core.views.layout()
    switches = _switches(context, 1)
    return {**answer, "switch": switches[-1] if switches else None}


async def _put_back(context: AdminContext, mode: str) -> dict[str, Any]:
    out = context.core.views.modes_out
    if mode not in out:
        text = "There is nothing to put back: every mode serves."
        if out:
            text = f"'{mode[:40]}' is not out of service: use one of {', '.join(sorted(out))}."
        raise AnswerError(400, "invalid_value", text, "mode")
    await context.owner.post(ReinstateMode(mode))
    return context.core.views.layout()


async def _renew(context: AdminContext, wanted: Sequence[int]) -> dict[str, Any]:
    ranks = tuple(map(Rank, sorted(wanted)))
    groups = communicator_plan(context.world, context.widths)
    if ranks and ranks not in (*groups, *zip(range(context.world), strict=True)):
        raise AnswerError(400, "invalid_value", _no_group(ranks, groups, context.world), "ranks")
    if not context.owner.launcher_outboxes:
        text = "No launcher of ranks is connected: check that `aileron rank` runs, and try again."
        raise AnswerError(503, "no_launcher", text)
    await context.owner.post(RenewalWanted(ranks))
    return context.core.views.layout()


def _no_group(ranks: Sequence[int], groups: Sequence[Sequence[int]], world: int) -> str:
    """Return the sentence about ranks that are not those of one group."""
    absent = next((rank for rank in ranks if not 0 <= rank < world), None)
    if absent is not None:
        others = f"the ranks are 0 to {world - 1}" if world > 1 else "the only rank is 0"
        return f"Rank {absent} does not exist: {others}."
    example = next((f"such as {' '.join(map(str, each))}, " for each in groups), "")
    names = ", ".join(map(str, ranks))
    return f"Ranks {names} are no group: name one rank, those of one group, {example}or none."


async def _reload(context: AdminContext) -> dict[str, Any]:
    if context.reload is None:
        text = "This coordinator has no configuration file: restart it with other settings."
        raise AnswerError(400, "no_config_file", text)
    try:
        await context.reload.reload()
    except RestartNeededError as error:
        raise AnswerError(409, "restart_needed", _sentence(str(error)), error.fields[0]) from error
    except ConfigError as error:
        raise AnswerError(400, "invalid_config", str(error)) from error
    return {"config": context.reload.view()}


def _switches(context: AdminContext, last: int) -> list[dict[str, Any]]:
    switches: Any = context.core.views.switches(last)["switches"]
    return _of_day(switches, "started_ms", context.clock(), "time")


def _read_wanted(context: AdminContext, body: SwitchBody) -> tuple[Layout, Carry]:
    try:
        layout = parse_layout(body.layout, context.world, context.widths)
    except LayoutError as error:
        raise AnswerError(400, "invalid_value", _sentence(str(error)), "layout") from error
    if body.carry is None:
        return layout, context.default_carry
    try:
        return layout, Carry(body.carry)
    except ValueError:
        plans = ", ".join(carry.value for carry in Carry)
        raise AnswerError(
            400, "invalid_value", f"'{body.carry[:40]}' is no carry plan: use {plans}.", "carry"
        ) from None


def _require_target(core: Core, wanted: str) -> None:
    if (target := core.views.target_name) != wanted:
        raise AnswerError(
            409,
            "superseded",
            f"'{wanted}' gave way to '{target}', the layout wanted now: see `aileron explain`.",
        )


async def _until_serving(core: Core, wanted: str) -> None:
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            epoch = core.views.epoch
            while not core.views.is_serving:
                await asyncio.sleep(WAIT_POLL_S)
                if core.views.epoch != epoch:  # Polling must be cheap.
                    _require_target(core, wanted)
                    epoch = core.views.epoch
    except TimeoutError:
        raise AnswerError(
            504,
            "deadline_exceeded",
            f"'{wanted}' does not serve after {WAIT_LIMIT_S:.0f} s; it is still wanted: follow "
            "its progress with GET /admin/layout.",
        ) from None


def _of_day(
    views: list[dict[str, Any]], name: str, now_ms: int, new_name: str = ""
) -> list[dict[str, Any]]:
    """Replace times of the monotonic clock by times of day."""
    now_s = time.time()
    result = []
    for view in views:
        moment = datetime.fromtimestamp(now_s - (now_ms - view[name]) / 1000, UTC)
        rest = {key: value for key, value in view.items() if key != name}
        result.append({(new_name or name): moment.isoformat(timespec="milliseconds"), **rest})
    return result


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


async def _on_answer_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AnswerError)
    return error.answer


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_answer(400, "invalid_json", "Send a body that is valid JSON.")
    if first["loc"] == ("body",):
        text = 'Send Content-Type: application/json and an object such as {"layout": "dp2"}.'
        return error_answer(400, "invalid_value", text, "body")
    where = ".".join(str(part) for part in first["loc"][1:])
    return error_answer(400, "invalid_value", f"{where}: {first['msg']}.", where)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes at a request's path."""
    methods = {
        method
        for route in request.app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods
    }
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        text = f"Unknown admin URL: {request.method} {request.url.path[:100]}."
        if request.url.path.startswith("/v1/"):
            text += " Requests go to the serving port, 8000 unless another is set."
        return error_answer(404, "unknown_url", text)
    if error.status_code == 405:
        answer = error_answer(405, "method_not_allowed", f"{request.method} is not allowed here.")
        answer.headers["Allow"] = ", ".join(_allowed_methods(request))
        return answer
    return error_answer(error.status_code, "invalid_request", str(error.detail))
