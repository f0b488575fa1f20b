"""Who a client is."""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.protocol.config import ConfigError
from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from gateway.admission import keyring
from gateway.admission.keyring import WRONG_KEYS_PER_MINUTE, KeyRing
from gateway.errors import ApiError

HERE = "127.0.0.1"


def write(path: Path, *secrets: str) -> Path:
    keys = [ApiKey(hash=hash_of(each), tenant=each) for each in secrets]
    fresh = path.with_suffix(".new")
    fresh.write_text("keys:\n" + "".join(map(dump_key, keys)) if keys else "keys: []\n")
    fresh.replace(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.yaml", "one", "two")


async def who(ring: KeyRing, header: str, address: str = HERE) -> str:
    found = await ring.identify({"authorization": header}, address)
    assert found is not None
    return f"{found.status} {found.code}" if isinstance(found, ApiError) else found.tenant


async def test_without_a_file_everyone_is_anonymous() -> None:
    assert await KeyRing("").identify({}, HERE) is None


async def test_right_keys_are_known(path: Path) -> None:
    ring = KeyRing(str(path))
    assert await who(ring, "Bearer one") == "one"
    assert await who(ring, "bearer  two ") == "two"


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one two"),
        *("Bearer \xff", "Bearer " + "x" * 10_000, "Bearer " + hash_of("one")),
    ],
)
async def test_anything_else_is_refused(path: Path, header: str) -> None:
    ring = KeyRing(str(path))
    assert await who(ring, header) == "401 invalid_api_key"
    found = await ring.identify({"authorization": header}, "other")
    assert isinstance(found, ApiError)
    assert (b"www-authenticate", b"Bearer") in found.headers()
    assert "three" not in found.message


async def test_a_key_may_come_in_a_header_of_its_own(path: Path) -> None:
    """On routes whose clients send it there; both headers are tried, as one guess."""
    ring = KeyRing(str(path))
    for number in range(WRONG_KEYS_PER_MINUTE):
        sent = {"x-api-key": f"x{number}", "authorization": f"Bearer {number}"}
        found = await ring.identify(sent, HERE, "x-api-key")
        assert isinstance(found, ApiError)
        assert (found.status, found.code) == (401, "invalid_api_key")
    for sent, tenant in (
        ({"x-api-key": "one"}, "one"),
        ({"authorization": "Bearer one"}, "one"),
        ({"x-api-key": "one", "authorization": "Bearer two"}, "one"),
        ({"x-api-key": "three", "authorization": "Bearer two"}, "two"),
        ({"x-api-key": " one ", "authorization": "Basic two"}, "one"),
    ):
        found = await ring.identify(sent, HERE, "x-api-key")
        assert isinstance(found, ApiKey)
        assert found.tenant == tenant
    elsewhere = await ring.identify({"x-api-key": "one"}, "10.0.0.3")
    assert isinstance(elsewhere, ApiError)
    assert "Authorization: Bearer KEY" in elsewhere.message
    none = await ring.identify({}, "10.0.0.3", "x-api-key")
    assert isinstance(none, ApiError)
    assert "`Authorization: Bearer KEY` or `x-api-key: KEY`" in none.message
    for long in ({"x-api-key": "x" * 10_000}, {"x-api-key": "\xff"}, {"x-api-key": ""}):
        assert isinstance(await ring.identify(long, "10.0.0.3", "x-api-key"), ApiError)


async def test_a_key_expires_in_mid_life(path: Path) -> None:
    noon = datetime(2027, 1, 31, 12, tzinfo=UTC)
    keys = (
        ApiKey(hash=hash_of("one"), tenant="one", expires=noon),
        ApiKey(hash=hash_of("two"), tenant="two", expires=noon, revoked=noon - timedelta(days=9)),
    )
    path.write_text("keys:\n" + "".join(map(dump_key, keys)))
    now = noon - timedelta(seconds=1)
    ring = KeyRing(str(path), lambda: now)
    assert await who(ring, "Bearer one") == "one"
    assert await who(ring, "Bearer two") == "401 api_key_revoked"
    now = noon
    for _ in range(2 * WRONG_KEYS_PER_MINUTE):
        assert await who(ring, "Bearer one") == "401 api_key_expired"
    assert await who(ring, "Bearer three") == "401 invalid_api_key", "no guess was counted"
    found = await ring.identify({"authorization": "Bearer one"}, HERE)
    assert isinstance(found, ApiError)
    assert found.message == "The API key is expired: ask the server's operator for a new one."
    assert (b"www-authenticate", b"Bearer") in found.headers()


async def test_an_address_that_guesses_is_slowed_down_and_right_keys_are_not(path: Path) -> None:
    ring = KeyRing(str(path))
    for number in range(WRONG_KEYS_PER_MINUTE):
        assert await who(ring, f"Bearer {number}") == "401 invalid_api_key"
    assert await who(ring, "Bearer x") == "429 rate_limit_exceeded"
    assert await who(ring, "Bearer x", "10.0.0.2") == "401 invalid_api_key"
    assert await who(ring, "Bearer one") == "one"


async def test_file_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "RELOAD_S", 0.01)
    ring = KeyRing(str(path))
    watch = asyncio.create_task(ring.watch())
    write(path, "two", "three")
    while await who(ring, "Bearer three", os.urandom(4).hex()) != "three":
        await asyncio.sleep(0.01)
    assert await who(ring, "Bearer one") == "401 invalid_api_key"
    path.write_text("keys: 7")
    await asyncio.sleep(0.1)
    assert await who(ring, "Bearer three") == "three", "a broken file changes nothing"
    assert "keys" in ring.warning
    path.unlink()
    await asyncio.sleep(0.1)
    assert await who(ring, "Bearer three") == "three"
    assert "cannot read the keys" in ring.warning
    write(path, "two", "three")
    while ring.warning:
        await asyncio.sleep(0.01)
    write(path)
    while await who(ring, "Bearer three", os.urandom(4).hex()) == "three":
        await asyncio.sleep(0.01)
    watch.cancel()


def test_missing_file_is_a_mistake_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the keys"):
        KeyRing(str(tmp_path / "none.yaml"))
