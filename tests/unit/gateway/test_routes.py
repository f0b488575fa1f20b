"""The allow-list, on a small application; the integration test holds it against vLLM's own."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.routing import Mount

from gateway.errors import api_error
from gateway.http.routes import (
    UNKNOWN_URL,
    VLLM_ROUTES,
    Readiness,
    add_own_routes,
    close_other_routes,
    find_route,
)

SECRET = "kanarienvogel"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field("", alias="town")
    inside: "Place | None" = None


class Prompt(BaseModel):
    prompt: str
    stop: list[str] | str = ""
    logit_bias: dict[str, float] = {}
    documents: list[dict[str, str]] = []
    extra: dict[str, str | int | list[str | int]] | None = None
    place: Place | None = None


def deep(levels: int) -> dict[str, Any]:
    return {"inside": deep(levels - 1) if levels else {"town": 1}}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer() -> dict[str, str]:
        return {}

    async def complete(prompt: Prompt) -> dict[str, str]:
        return {}

    for method, path in VLLM_ROUTES - {("POST", "/v1/completions")}:
        app.add_api_route(path, answer, methods=[method])
    app.add_api_route("/v1/completions", complete, methods=["POST"])
    app.add_api_route("/collective_rpc", answer, methods=["POST"])
    app.add_api_route("/v1/models", answer, methods=["DELETE"])
    app.add_api_route("/tokenize", answer, methods=["POST", "PUT"])
    app.router.routes.append(Mount("/metrics", Starlette()))
    return app


async def ask(app: FastAPI, method: str, path: str, body: object = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.request(method, path, json=body)


async def test_what_is_not_listed_is_taken_out(app: FastAPI) -> None:
    close_other_routes(app)
    for method, path in [
        ("POST", "/collective_rpc"),
        ("GET", "/metrics"),
        ("DELETE", "/v1/models"),
        ("PUT", "/tokenize"),
    ]:
        assert (await ask(app, method, path)).status_code in (404, 405)
    assert (await ask(app, "GET", "/v1/models")).status_code == 200


def test_missing_route_of_vllm_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="/v1/chat/completions"):
        close_other_routes(FastAPI())


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/models/demo", None),
        ("GET", "/v1/models/org/name", None),
        ("GET", "/v1/models/", "unknown_url"),
        ("GET", "/ready", None),
        ("POST", "/ready", "method_not_allowed"),
        ("HEAD", "/health", None),
        ("GET", "/openapi.json", "unknown_url"),
    ],
)
def test_find_route(method: str, path: str, code: str | None) -> None:
    error = find_route(method, path)
    assert (error.code if error else None) == code


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/V1/models/", "did you mean /v1/models?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/embeddings", "no embeddings"),
        ("/v1/audio/transcriptions", "text alone"),
        ("/rerank", "text alone"),
        ("/v1/conversations", "send the whole input"),
        ("/metrics", "on the admin port"),
        ("/admin/layout", "on the admin port"),
        ("/", UNKNOWN_URL),
        ("/v1/secret-of-a-client", UNKNOWN_URL),
    ],
)
def test_an_unknown_url_says_where_to_go_and_quotes_nothing(path: str, words: str) -> None:
    error = find_route("PUT", path)
    assert error is not None
    assert error.code == "unknown_url"
    assert words in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("raw_path", "path", "code"),
    [
        (b"/v1/models", "/v1/models", None),
        (b"/v1%2fmodels", "/v1/models", "unknown_url"),
        (b"/v1%2Fmodels", "/v1/models", "unknown_url"),
        (b"/v1/models%2fdemo", "/v1/models/demo", "unknown_url"),
        (b"/v1/models/org%2Fname", "/v1/models/org/name", None),
        (b"/v1/files/a%2fcontent", "/v1/files/a/content", "unknown_url"),
        (b"/v1/responses/a%2Finput_items", "/v1/responses/a/input_items", "unknown_url"),
    ],
)
def test_a_slash_is_one_for_everybody_who_reads_the_path(
    raw_path: bytes, path: str, code: str | None
) -> None:
    error = find_route("GET", path, raw_path)
    assert (error.code if error else None) == code


async def test_readiness_says_why_not(app: FastAPI) -> None:
    now = Readiness(ready=False, reason=api_error("not_serving", "The cell switches."))
    add_own_routes(app, lambda: now)
    response = await ask(app, "GET", "/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_serving"
    assert (await ask(app, "GET", "/health")).status_code == 200
    now = Readiness(ready=True, layout="dp2", epoch=3)
    assert (await ask(app, "GET", "/ready")).json() == {
        "status": "ready",
        "layout": "dp2",
        "epoch": 3,
    }


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "prompt", "prompt: Field required"),
        ({"prompt": 3}, "prompt", "prompt: Input should be a valid string"),
        ({"prompt": "x", "stop": [1]}, "stop.0", "stop.0: Input should be a valid string"),
        ([1], None, "Input should be a valid dictionary"),
        ({"prompt": "x", "logit_bias": {SECRET: "x"}}, "logit_bias", "logit_bias: "),
        ({"prompt": "x", "logit_bias": {SECRET * 5_000: "x"}}, "logit_bias", "logit_bias: "),
        ({"prompt": "x", "documents": [{}, {SECRET: 1}]}, "documents", "documents: "),
        ({"prompt": "x", "extra": {SECRET: {}}}, "extra", "extra: "),
        ({"prompt": "x", "extra": {SECRET: ["", {}]}}, "extra", "extra: "),
        ({"prompt": "x", "place": {SECRET: 1}}, "place", "place: "),
        ({"prompt": "x", "place": {"town": 1}}, "place.town", "place.town: "),
        ({"prompt": "x", "place": deep(20)}, "place" + ".inside" * 7, "place.inside"),
    ],
)
async def test_refused_body_names_the_field(
    app: FastAPI, body: object, param: str | None, text: str
) -> None:
    add_own_routes(app, lambda: Readiness(ready=True))
    response = await ask(app, "POST", "/v1/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert error["message"].startswith(text)
    assert SECRET not in response.text
