"""`aileron up` with TLS everywhere: clients, operators, and the processes among themselves."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from coordinator.protocol import wire
from coordinator.protocol.cell_tls import SERVER_NAME_OPTION
from coordinator.protocol.messages.gateway import GatewayHello
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from tests.harness.cells.product import MODEL_NAME, Product, product
from tests.harness.cells.servers import free_port
from tests.harness.tls.authority import LOOPBACK, Authority, Pair

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

NAME = "aileron-cell"
TOKEN = "a-secret-for-tests-only"
CHAT: dict[str, Any] = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Write about the sea."}],
    "max_tokens": 120,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


class Everywhere:
    """The running product, and who signed what."""

    def __init__(self, folder: Path) -> None:
        self.ports, self.cell = Authority(folder / "ports"), Authority(folder / "cell")
        self.own = self.cell.sign("member", [NAME])
        self.pair = self.ports.sign("port", LOOPBACK)
        self.grpc_port = free_port()
        files = {"tls_cert_file": str(self.pair.cert), "tls_key_file": str(self.pair.key)}
        self.settings: dict[str, Any] = {
            "coordinator": {"listen": f"127.0.0.1:{self.grpc_port}"},
            "gateway": files,
            "admin": files,
            "cell_tls": {
                "cert_file": str(self.own.cert),
                "key_file": str(self.own.key),
                "ca_file": str(self.cell.file),
            },
        }
        self.product: Product

    def client(self) -> openai.OpenAI:
        trust = ssl.create_default_context(cafile=str(self.ports.file))
        http = openai.DefaultHttpxClient(verify=trust)
        return openai.OpenAI(
            base_url=f"{self.product.url}/v1", api_key="none", http_client=http, max_retries=0
        )

    def cli(self, *words: str, ca: Path | None = None) -> "subprocess.CompletedProcess[str]":
        command = [*words, "--admin-url", self.product.admin]
        command += ["--admin-ca", str(ca)] if ca else []
        return subprocess.run(
            [sys.executable, "-m", "coordinator.cli", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everywhere]:
    folder = tmp_path_factory.mktemp("tls")
    made = Everywhere(folder)
    before = os.environ.get("AILERON_TOKEN")
    os.environ["AILERON_TOKEN"] = TOKEN
    try:
        with product(folder, ranks=2, settings=made.settings) as running:
            made.product = running
            yield made
    finally:
        if before is None:
            del os.environ["AILERON_TOKEN"]
        else:
            os.environ["AILERON_TOKEN"] = before


def text_of(everywhere: Everywhere, then: Any = None) -> str:
    """Stream a text; call `then` after its first tokens."""
    parts = []
    with everywhere.client() as client:
        for chunk in client.chat.completions.create(**CHAT, stream=True):
            parts.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
            if then is not None and len(parts) == 5:
                then()
    return "".join(parts)


def test_streams_are_exact_through_a_switch_and_a_lost_rank(everywhere: Everywhere) -> None:
    whole = text_of(everywhere)
    assert len(whole) > 100

    def switch(layout: str) -> None:
        done = everywhere.cli("switch", layout, ca=everywhere.ports.file)
        assert done.returncode == 0, done.stderr

    assert text_of(everywhere, lambda: switch("tp2")) == whole
    assert text_of(everywhere, lambda: switch("dp2")) == whole
    ranks = everywhere.product.child("worker")
    children = Path(f"/proc/{ranks}/task/{ranks}/children").read_text().split()

    def lose() -> None:
        # Either of both may lead the stream; the exit reporter is the first child.
        os.kill(int(children[1]), signal.SIGKILL)

    assert text_of(everywhere, lose) == whole
    deadline = time.monotonic() + 60
    while True:
        answer = everywhere.cli("status", "--once", "--json", ca=everywhere.ports.file)
        assert answer.returncode == 0, answer.stderr
        ranks_now = json.loads(answer.stdout)["ranks"]
        if all(rank["available"] for rank in ranks_now):
            break
        assert time.monotonic() < deadline, answer.stdout
        time.sleep(0.2)
    assert text_of(everywhere) == whole


def test_up_prints_https_urls(everywhere: Everywhere) -> None:
    running = everywhere.product
    assert f"OpenAI API   https://127.0.0.1:{running.port}/v1" in running.log()
    assert f"admin API    https://127.0.0.1:{running.admin_port}" in running.log()


def test_operators_need_the_right_authority(everywhere: Everywhere) -> None:
    for ca in (None, everywhere.cell.file):
        refused = everywhere.cli("status", "--once", ca=ca)
        assert refused.returncode == 1
        assert "is not trusted" in refused.stderr
        assert "--admin-ca" in refused.stderr
    missing = everywhere.cli("status", "--once", ca=Path("/nowhere.pem"))
    assert "--admin-ca /nowhere.pem: No such file" in missing.stderr


async def hello(everywhere: Everywhere, channel: grpc.aio.Channel) -> Any:
    """Open a gateway's session with the right token; return the coordinator's answer."""
    async with channel:
        method: Any = channel.stream_stream(
            wire.GATEWAY_PATH,
            request_serializer=wire.encode,
            response_deserializer=wire.decode_gateway_down,
        )
        call = method(metadata=((wire.TOKEN_METADATA_KEY, TOKEN),), timeout=10)
        await call.write(GatewayHello(PROTOCOL_VERSION, "stranger"))
        answer = await call.read()
        call.cancel()
        return answer


def secured(
    everywhere: Everywhere, authority: Authority, pair: Pair | None, name: str = NAME
) -> grpc.aio.Channel:
    own = (pair.key.read_bytes(), pair.cert.read_bytes()) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *own)
    options = ((SERVER_NAME_OPTION, name),)
    return grpc.aio.secure_channel(f"127.0.0.1:{everywhere.grpc_port}", credentials, options)


async def test_the_coordinator_takes_only_members_with_a_certificate(
    everywhere: Everywhere, tmp_path: Path
) -> None:
    right = everywhere.cell
    assert type(await hello(everywhere, secured(everywhere, right, everywhere.own))).__name__ == (
        "Welcome"
    )
    other = Authority(tmp_path)
    strangers = [
        grpc.aio.insecure_channel(f"127.0.0.1:{everywhere.grpc_port}"),
        secured(everywhere, right, None),
        secured(everywhere, right, other.sign("member", [NAME])),
        secured(everywhere, other, everywhere.own),
        secured(everywhere, right, everywhere.own, "another-name"),
    ]
    for channel in strangers:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await hello(everywhere, channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
