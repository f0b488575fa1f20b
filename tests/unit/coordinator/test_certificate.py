"""A server's certificate: what is refused, and what a renewal changes."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from coordinator.protocol.certificate import CertificateError, ServerCertificate, certificate_of
from coordinator.protocol.config import ConfigError, check_config
from tests.harness.tls.authority import Authority, Pair


def served(context: ssl.SSLContext, authority: Path) -> int:
    """Shake hands in memory; return the serial number of the certificate that the client got."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trust = ssl.create_default_context(cafile=str(authority))
    client = trust.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for each in (client, server):
            try:
                each.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = client.getpeercert()
    assert certificate is not None
    return int(str(certificate["serialNumber"]), 16)


def read(pair: Pair) -> ServerCertificate:
    return ServerCertificate("gateway", str(pair.cert), str(pair.key))


def test_a_renewed_certificate_is_served_by_the_same_context(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = read(authority.sign("server"))
    first = served(certificate.context, authority.file)
    assert not certificate.has_changed()
    authority.sign("server")
    assert certificate.has_changed()
    certificate.renew()
    assert not certificate.has_changed()
    assert served(certificate.context, authority.file) != first


def test_a_key_of_another_certificate_leaves_the_old_pair_in_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = read(pair := authority.sign("server"))
    first = served(certificate.context, authority.file)
    old_key = pair.key.read_bytes()
    authority.sign("server")
    new_key = pair.key.read_bytes()
    pair.key.write_bytes(old_key)
    with pytest.raises(CertificateError, match=r"no private key of the certificate in .*\.pem"):
        certificate.renew()
    assert served(certificate.context, authority.file) == first
    assert not certificate.has_changed(), "it is read again only after the next change"
    pair.key.write_bytes(new_key)
    os.utime(pair.key, ns=(1, 1))
    certificate.renew()
    assert served(certificate.context, authority.file) != first


def test_a_file_that_is_away_is_no_change(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    certificate = read(pair)
    pair.key.unlink()
    assert not certificate.has_changed()


def test_a_missing_file_is_refused_by_its_setting(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    pair.key.unlink()
    with pytest.raises(CertificateError, match=r"gateway: cannot read .*-key\.pem: No such"):
        read(pair)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CertificateError, match=r"the key has a password.*without a password\."):
        read(pair)


def test_older_tls_than_1_2_is_not_spoken(tmp_path: Path) -> None:
    context = read(Authority(tmp_path).sign("server")).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_one_file_without_the_other_is_refused() -> None:
    for named, missing in (("cert", "key"), ("key", "cert")):
        settings = {"model": {"path": "m"}, "gateway": {f"tls_{named}_file": "x.pem"}}
        with pytest.raises(ConfigError, match=f"gateway.tls_{missing}_file: set both, or none"):
            check_config(settings)


def test_without_files_there_is_no_certificate() -> None:
    assert certificate_of("gateway", "", "") is None
