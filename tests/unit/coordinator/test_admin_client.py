"""Every way in which an admin URL can be wrong ends in a sentence that says what to do."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from coordinator.cli import main
from coordinator.cli.errors import CliError
from coordinator.cli.last_run import find_admin_url


@contextmanager
def server(health: str) -> Iterator[int]:
    """Serve nothing but GET /health; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = health.encode() if self.path == "/health" else b'{"error":{"message":"No."}}'
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_port
        running.shutdown()


def refusal(capsys: pytest.CaptureFixture[str], url: str) -> str:
    assert main(["status", "--once", "--admin-url", url]) != 0
    said = capsys.readouterr().err
    assert said.startswith("aileron: ")
    assert said.count("\n") == 1
    return said


def test_the_serving_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with server('{"status": "ok"}') as port:
        said = refusal(capsys, f"http://127.0.0.1:{port}")
    assert f"http://127.0.0.1:{port} is the serving port: name the admin port" in said


def test_another_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with server("hello") as port:
        assert "is no aileron admin API" in refusal(capsys, f"127.0.0.1:{port}")


def test_the_admin_port_s_own_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with server('{"status": "alive"}') as port:
        assert refusal(capsys, f"127.0.0.1:{port}") == "aileron: No.\n"


def test_https_at_a_plain_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with server("hello") as port:
        said = refusal(capsys, f"https://127.0.0.1:{port}")
    assert f"without TLS: use --admin-url http://127.0.0.1:{port}." in said


def test_http_at_a_tls_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4_096)

        threading.Thread(target=hang_up, daemon=True).start()
        port = listener.getsockname()[1]
        said = refusal(capsys, f"127.0.0.1:{port}")
    assert f"use --admin-url https://127.0.0.1:{port} if the admin port has a certificate" in said


def test_an_address_needs_no_scheme() -> None:
    assert find_admin_url("localhost:8001") == "http://localhost:8001"
    assert find_admin_url("[::1]:8001") == "http://[::1]:8001"
    assert find_admin_url("https://host/") == "https://host"


@pytest.mark.parametrize(
    "url", ["ftp://host:1", "host:99999", "http:///x", "host:word", "http://[x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(CliError, match="use one such as") as refused:
        find_admin_url(url)
    assert refused.value.status == 2
