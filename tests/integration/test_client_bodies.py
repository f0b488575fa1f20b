"""How clients in the wild send bodies: a real gateway process and raw sockets."""

import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator

import httpx
import pytest
from backports import zstd

from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess
from tests.harness.gateway.client_bodies import BODIES, CHAT, PATH, error_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

JSON = {"content-type": "application/json"}


@pytest.fixture
async def client(gateway: GatewayProcess, cell: FakeCell) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


def raw(gateway: GatewayProcess, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
    return answer


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize("text", ['{"x": "\\ud83d\\ude00"}', "D:\\udev", "\\\\ud83d", "😀"])
@pytest.mark.parametrize("path", BODIES)
async def test_text_that_is_itself_json_passes(
    client: httpx.AsyncClient, text: str, path: str
) -> None:
    body = json.loads(json.dumps(BODIES[path]))
    if path == PATH:
        body["messages"][0]["content"] = text
    else:
        body["prompt" if "prompt" in body else "input"] = text
    answer = await client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\\\ud83d", r"\ud83d\\ude00"])
async def test_half_a_character_is_refused(client: httpx.AsyncClient, half: str) -> None:
    content = json.dumps(CHAT).replace("say it", half)
    answer = await client.post(PATH, content=content, headers=JSON)
    assert error_of(answer)[:2] == (400, "invalid_json")


def encode(encoding: str, data: bytes) -> bytes:
    match encoding:
        case "gzip" | "x-gzip":
            return gzip.compress(data)
        case "deflate":
            return zlib.compress(data)
        case "zstd":
            return zstd.compress(data)
    return data


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "zstd", "identity", "GZIP"])
@pytest.mark.parametrize("path", BODIES)
async def test_bodies_may_be_compressed(
    client: httpx.AsyncClient, encoding: str, path: str
) -> None:
    content = encode(encoding.lower(), json.dumps(BODIES[path]).encode())
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_refused_with_the_list(
    client: httpx.AsyncClient, encoding: str
) -> None:
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=b"x" * 100, headers=headers)
    assert error_of(answer)[:2] == (415, "unsupported_media_type")
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert "gzip, deflate, zstd" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_refused_at_the_limit(client: httpx.AsyncClient, encoding: str) -> None:
    content = encode(encoding, b" " * (256 * 1024**2))
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=content, headers=headers)
    assert error_of(answer)[:2] == (413, "request_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [1, 10, -3])
async def test_what_is_not_in_its_encoding_is_refused(
    client: httpx.AsyncClient, encoding: str, cut: int
) -> None:
    content = encode(encoding, json.dumps(CHAT).encode())[:cut]
    headers = {**JSON, "content-encoding": encoding}
    answer = await client.post(PATH, content=content, headers=headers)
    assert answer.status_code == 400


# ------------------------------------------------------------------ connections


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = [
        b"POST /v1/chat/completions HTTP/" + version,
        *(b"Host: x", b"Content-Type: application/json"),
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join([*head, b"", b""]) + body


def test_offer_of_http_2_is_ignored(gateway: GatewayProcess, cell: FakeCell) -> None:
    """As Java's HttpClient offers it with its first request."""
    body = json.dumps(CHAT).encode()
    first = post(body, H2C.removesuffix(b"\r\n"))
    answer = raw(gateway, first + post(body, b"Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b'"finish_reason":"length"') == 2


@pytest.mark.parametrize("path", BODIES)
def test_streams_to_http_1_0_have_no_chunks(
    gateway: GatewayProcess, cell: FakeCell, path: str
) -> None:
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    request = post(body, version=b"1.0").replace(b"/v1/chat/completions", path.encode())
    head, _, events = raw(gateway, request).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith((b"data: {", b"event: response.created\n"))
    assert events.endswith(b"data: [DONE]\n\n") or b"event: response.incomplete" in events


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"POST /v1/nothing", b"404"), (b"POST /v1/chat/completions", b"415")],
)
def test_an_early_error_says_that_the_connection_closes(
    gateway: GatewayProcess, cell: FakeCell, request_line: bytes, status: bytes
) -> None:
    head = request_line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
    answer = raw(gateway, head + b"x" * 1_000)
    assert answer.split()[1] == status
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/demo", "/version"])
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PATCH", "/v1/batches/x", "GET, HEAD"),
    ],
)
async def test_answers_405_say_what_is_allowed(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)
    assert error_of(answer)[:2] == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed
