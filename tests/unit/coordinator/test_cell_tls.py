"""TLS between the processes: which files are refused, and what a renewal changes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from comm_pool.layout import parse_layout
from coordinator.core.core import Core
from coordinator.model.settings import CoreSettings
from coordinator.protocol.cell_tls import CellTls, cell_tls_of
from coordinator.protocol.certificate import CertificateError
from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.tls_config import CellTlsConfig
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.server import CellServer
from tests.harness.tls.authority import Authority, Pair

NAME = "aileron-cell"
TOKEN = "a-secret-for-tests-only"


def settings(pair: Pair, authority: Authority) -> CellTlsConfig:
    return CellTlsConfig(
        cert_file=str(pair.cert), key_file=str(pair.key), ca_file=str(authority.file)
    )


def test_without_files_there_is_no_tls() -> None:
    assert cell_tls_of(CellTlsConfig()) is None


def test_all_files_are_set_or_none() -> None:
    with pytest.raises(ConfigError, match=r"cell_tls\.key_file is missing: set cert_file, key"):
        check_config({"model": {"path": "m"}, "cell_tls": {"cert_file": "x.pem"}})


def test_files_that_peers_would_not_accept_are_refused_with_the_reason(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "another authority")
    pair = authority.sign("member", [NAME])
    CellTls(settings(pair, authority))
    with pytest.raises(CertificateError, match=r"(?s)unable to get local issuer.*DNS name aileron"):
        CellTls(settings(pair, other))
    with pytest.raises(CertificateError, match="Hostname mismatch"):
        CellTls(settings(authority.sign("elsewhere", ["elsewhere"]), authority))
    with pytest.raises(CertificateError, match=r"cell_tls: .* is no private key of the cert"):
        CellTls(settings(Pair(pair.cert, authority.sign("x", [NAME]).key), authority))
    with pytest.raises(CertificateError, match=r"cell_tls\.ca_file: cannot read .*gone.pem: No"):
        CellTls(
            settings(pair, authority).model_copy(update={"ca_file": str(tmp_path / "gone.pem")})
        )


def test_unusable_new_files_leave_the_old_ones_in_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    pair = authority.sign("member", [NAME])
    tls = CellTls(settings(pair, authority))
    first = tls.pems()
    assert tls.pems() is first
    pair.cert.write_text("rubbish")
    assert tls.pems() is first
    pair.cert.unlink()
    assert tls.pems() is first
    authority.sign("member", [NAME])
    renewed = tls.pems()
    assert renewed is not first
    assert renewed.cert == pair.cert.read_bytes()


@contextlib.asynccontextmanager
async def served(tls: CellTls) -> AsyncIterator[int]:
    core = Core(CoreSettings(world=2, layout=parse_layout("dp2", 2, (1, 2))), "c1", monotonic_ms())
    owner = CoreActor(core, tick_ms=20, clock=monotonic_ms)
    server = CellServer(owner, TOKEN, world=2, tls=tls)
    port = await server.start("127.0.0.1:0")
    yield port
    await server.stop()


async def test_a_coordinator_serves_a_renewed_certificate_to_new_connections(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "a")
    pair = authority.sign("member", [NAME])
    stranger = authority.sign("client", ["client"])
    trust = ssl.create_default_context(cafile=str(authority.file))
    trust.load_cert_chain(stranger.cert, stranger.key)
    trust.set_alpn_protocols(["h2"])

    async def serial(port: int) -> str:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust, server_hostname=NAME
        )
        certificate = writer.get_extra_info("peercert")
        writer.transport.abort()
        return str(certificate["serialNumber"])

    async with served(CellTls(settings(pair, authority))) as port:
        first = await serial(port)
        assert await serial(port) == first
        authority.sign("member", [NAME])
        assert await serial(port) != first
