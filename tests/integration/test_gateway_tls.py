"""HTTPS on the serving port of a real gateway process, with real clients."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.tls.authority import Authority
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
IDS = [11, 12, 13, 14]
RENEWAL_MAX_S = 10.0


async def answer(ran: Ran) -> None:
    for first, token in enumerate(IDS):
        ran.tokens(first, [token], "length" if first == len(IDS) - 1 else None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[GatewayProcess]:
    pair = authority.sign("server")
    cell = FakeCell(behave=answer)
    folder = tmp_path_factory.mktemp("gateway")
    files: dict[str, Any] = {"tls_cert_file": str(pair.cert), "tls_key_file": str(pair.key)}
    process = GatewayProcess(folder, MODEL_DIR, cell, processes=2, **files)
    yield process
    process.close()
    cell.close()


@contextlib.contextmanager
def client(gateway: GatewayProcess, authority: Authority) -> Iterator[openai.OpenAI]:
    trust = ssl.create_default_context(cafile=str(authority.file))
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(verify=trust),
        max_retries=0,
        timeout=30,
    ) as made:
        yield made


def test_clients_that_trust_the_authority_stream(
    gateway: GatewayProcess, authority: Authority
) -> None:
    assert gateway.url.startswith("https://")
    with client(gateway, authority) as trusting:
        whole = trusting.chat.completions.create(**CHAT, max_tokens=4)
        chunks = trusting.chat.completions.create(**CHAT, max_tokens=4, stream=True)
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text
    assert text == whole.choices[0].message.content


def test_clients_of_another_authority_refuse_the_certificate(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with (
        client(gateway, Authority(tmp_path)) as wary,
        pytest.raises(openai.APIConnectionError) as refused,
    ):
        wary.chat.completions.create(**CHAT, max_tokens=4)
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)


def test_plain_http_and_old_tls_get_no_answer(
    gateway: GatewayProcess, authority: Authority
) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(gateway.url.replace("https", "http") + "/health")
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{gateway.port}", "-brief"]
    for option, is_spoken in (("-tls1_1", False), ("-tls1_2", True)):
        ended = subprocess.run(
            [*command, option, "-cipher", "ALL:@SECLEVEL=0", "-CAfile", str(authority.file)],
            input=b"",
            check=False,
            capture_output=True,
            timeout=20,
        )
        assert (b"Protocol version: TLSv1.2" in ended.stderr) == is_spoken, ended.stderr
        assert (ended.returncode == 0) == is_spoken, ended.stderr


def test_limits_and_old_http_are_as_without_tls(
    gateway: GatewayProcess, authority: Authority
) -> None:
    offer = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    for request, status in (
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (offer, b"200"),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"\r\n", b"431"),
        (b"rubbish\r\n\r\n", b"400"),
    ):
        with connected(gateway, authority) as secure:
            secure.sendall(request)
            first = b""
            while b"\r\n" not in first:
                part = secure.recv(4_096)
                assert part, (request, first)
                first += part
        assert first.split()[1] == status, (request, first)


def test_a_connection_without_a_handshake_is_closed(gateway: GatewayProcess) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as silent:
        silent.settimeout(20)
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        assert 5 < time.monotonic() - started < 20


def test_a_renewed_certificate_is_for_new_connections_and_open_ones_continue(
    gateway: GatewayProcess, authority: Authority
) -> None:
    with connected(gateway, authority) as old:
        before = serial(old)
        authority.sign("server")
        deadline = time.monotonic() + RENEWAL_MAX_S
        streak = 0
        # Each process reads the files for itself, and the kernel chooses the process.
        while streak < 10:
            with connected(gateway, authority) as new:
                streak = streak + 1 if serial(new) != before else 0
            assert time.monotonic() < deadline, gateway.log.read_text()[-2_000:]
            time.sleep(0.1)
        old.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in old.recv(4_096)


def test_the_gateway_ends_in_time_with_open_connections(
    tmp_path: Path, authority: Authority
) -> None:
    pair = authority.sign("ending")
    cell = FakeCell(behave=answer)
    files: dict[str, Any] = {"tls_cert_file": str(pair.cert), "tls_key_file": str(pair.key)}
    gateway = GatewayProcess(tmp_path, MODEL_DIR, cell, **files)
    try:
        with connected(gateway, authority):
            gateway.signal(signal.SIGTERM)
            assert gateway.wait(20) == 0
    finally:
        gateway.close()
        cell.close()


def test_a_key_of_another_certificate_is_refused_at_start(
    tmp_path: Path, authority: Authority
) -> None:
    one, other = authority.sign("one"), authority.sign("other")
    files: dict[str, Any] = {"tls_cert_file": str(one.cert), "tls_key_file": str(other.key)}
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(MODEL_DIR)}, "gateway": files}))
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "--config", str(path)],
        check=False,
        capture_output=True,
        text=True,
        env={"AILERON_TOKEN": "a-secret-for-tests-only"},
        timeout=60,
    )
    assert ended.returncode == 2
    assert "is no private key of the certificate" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextlib.contextmanager
def connected(gateway: GatewayProcess, authority: Authority) -> Iterator[ssl.SSLSocket]:
    trust = ssl.create_default_context(cafile=str(authority.file))
    with (
        socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw,
        trust.wrap_socket(raw, server_hostname="localhost") as secure,
    ):
        yield secure


def serial(connection: ssl.SSLSocket) -> str:
    certificate = connection.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])
