"""API keys: what is at rest, what a file may hold, and the command that writes it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.keys import ApiKey, dump_key, hash_of, load_keys, new_secret


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_file_holds_hashes_and_keys_are_found_by_them(tmp_path: Path) -> None:
    secret = new_secret()
    key = ApiKey(hash=hash_of(secret), tenant="acme", max_tier="batch", tokens_per_minute=9)
    path = write(tmp_path / "keys.yaml", "keys:\n" + dump_key(key))
    assert load_keys(path) == {hash_of(secret): key}
    assert secret not in path.read_text()
    assert len({new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys: [{hash: sk-my-secret-key, tenant: a}]", "keys.0.hash"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: 'a b'}}]", "keys.0.tenant"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, max_tier: system}}]", "max_tier"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, colour: red}}]", "colour"),
        ("keys: [", "not valid YAML"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, expires: 2027-13-45}}]", "not valid YAML"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, expires: soon}}]", "keys.0.expires must"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, max_parallel: -1}}]", "keys.0.max_parallel"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, tokens_per_day: 0}}]", "must be 1 or more"),
        (f"keys: [{{hash: '{hash_of('x')}', tenant: a, prefix: {'x' * 33}}}]", "keys.0.prefix"),
        (
            f"keys: [{{hash: '{hash_of('x')}', tenant: a, max_tier: batch, "
            "default_tier: interactive}]",
            "keys.0.default_tier: interactive is more urgent than max_tier batch",
        ),
        (f"keys: [{', '.join([f'{{hash: {hash_of(chr(120))!r}, tenant: a}}'] * 2)}]", "twice"),
    ],
)
def test_mistakes_in_a_file_are_told_without_quoting_it(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_keys(write(tmp_path / "keys.yaml", text))
    assert told in str(caught.value)
    assert str(caught.value).count("keys.yaml") == 1
    assert "sk-my-secret-key" not in str(caught.value)


def test_command_adds_keys_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    for tenant in ("acme", "other"):
        arguments = ["key", "--tenant", tenant, "--file", str(path), "--max-tier", "batch"]
        assert main([*arguments, "--requests-per-minute", "60"]) == 0
    secrets = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sk-")]
    keys = load_keys(path)
    assert [keys[hash_of(secret)].tenant for secret in secrets] == ["acme", "other"]
    assert {key.requests_per_minute for key in keys.values()} == {60}
    assert {key.default_tier for key in keys.values()} == {"batch"}
    assert path.stat().st_mode & 0o077 == 0


def test_command_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write(tmp_path / "keys.yaml", "keys: 7")
    assert main(["key", "--tenant", "a", "--file", str(broken)]) == 2
    assert main(["key", "--tenant", "a b"]) == 2
    assert broken.read_text() == "keys: 7"
    assert "sk-" not in capsys.readouterr().out


def test_every_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    entry = f"  - hash: {hash_of('x')}\n    tenant: a\n"
    text = f"keys:\n{entry}    max_paralel: 3\n{entry}    tokens_per_day: -3\n"
    with pytest.raises(ConfigError) as caught:
        load_keys(write(tmp_path / "keys.yaml", text))
    assert str(caught.value).endswith(
        "keys.yaml: line 4: unknown field keys.0.max_paralel; did you mean keys.0.max_parallel? "
        "line 7: keys.1.tokens_per_day must be 1 or more; leave it out for no limit."
    )


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    text = f"keys:\n  - hash: {hash_of('x')}\n    tenant: a\n    max_tier: batch\n"
    [key] = load_keys(write(tmp_path / "keys.yaml", text)).values()
    assert (key.name, key.prefix, key.created, key.expires, key.revoked) == ("", "", *[None] * 3)
    assert (key.max_parallel, key.tokens_per_day) == (0, 0)
    assert key.state(datetime.now(UTC)) == "active"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("'2027-01-31'", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T12:00:00Z", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("'2027-01-31T12:00:00+02:00'", datetime(2027, 1, 31, 10, tzinfo=UTC)),
        ("2027-01-31 12:00:00", datetime(2027, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_a_key_expires_at_its_time(tmp_path: Path, text: str, moment: datetime) -> None:
    text = f"keys: [{{hash: '{hash_of('x')}', tenant: a, expires: {text}}}]"
    [key] = load_keys(write(tmp_path / "keys.yaml", text)).values()
    assert key.expires == moment
    assert key.state(moment - timedelta(seconds=1)) == "active"
    assert key.state(moment) == "expired"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_public_address_needs_keys_or_a_word(host: str) -> None:
    base = {"model": {"path": "x"}}
    with pytest.raises(ConfigError, match="insecure-no-auth"):
        check_config({**base, "gateway": {"host": host}})
    for way in ({"keys_file": "keys.yaml"}, {"insecure_no_auth": True}):
        check_config({**base, "gateway": {"host": host, **way}})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_config({"model": {"path": "x"}, "gateway": {"host": host}})


def test_up_refuses_a_public_address_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host", "0.0.0.0", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "gateway.keys_file" in told
    assert "--insecure-no-auth" in told


def test_several_processes_need_common_counters_and_ports_of_their_own() -> None:
    model = {"path": "x"}
    check_config({"model": model, "gateway": {"processes": 4}})
    shared = {"processes": 2, "keys_file": "keys.yaml", "rate_limit_storage": "redis://localhost"}
    check_config({"model": model, "gateway": shared})
    with pytest.raises(ConfigError, match="rate_limit_storage"):
        check_config({"model": model, "gateway": {"processes": 2, "keys_file": "keys.yaml"}})
    fixed = {"processes": 2, "token_listen": "tcp://127.0.0.1:9000"}
    with pytest.raises(ConfigError, match="token_listen"):
        check_config({"model": model, "gateway": fixed})
