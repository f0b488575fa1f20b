"""`aileron key new`, `list` and `revoke`, as a person uses them."""

import json
import multiprocessing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.protocol.keys import ApiKey, dump_key, hash_of, load_keys

HASHES = {name: hash_of(name) for name in ("one", "two", "three")}
BY_HAND = f"""\
# Our customers. Ask Ada before you change anything here.
keys:
- hash: {HASHES["one"]}   # the first customer
  tenant: acme

- {{hash: '{HASHES["two"]}', tenant: acme, tokens_per_minute: 9}}
# the end
- tenant: other
  hash: {HASHES["three"]}"""
DAY = datetime(2026, 3, 4, tzinfo=UTC)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["key", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["key", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def secret_in(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("sk-"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def by_hand(file: Path) -> Path:
    file.write_text(BY_HAND)
    return file


def test_a_new_key_has_a_name_a_prefix_and_a_time(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    words = ("new", "--tenant", "acme", "--file", file, "--expires", "90d", "--max-parallel", 3)
    secret = secret_in(run(capsys, *words, "--tokens-per-day", 5000))
    key = load_keys(file)[hash_of(secret)]
    assert secret.startswith(key.prefix)
    assert len(secret) - len(key.prefix) > 32
    assert key.created is not None
    assert key.expires is not None
    assert before <= key.created <= datetime.now(UTC)
    assert (key.expires - key.created).days == 90
    assert (key.name, key.max_parallel, key.tokens_per_day) == ("acme", 3, 5000)
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_names_are_given_and_are_never_taken_twice(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        run(capsys, "new", "--tenant", "acme", "--file", file)
    run(capsys, "new", "--tenant", "acme", "--name", "ci", "--file", file)
    assert [key.name for key in load_keys(file).values()] == ["acme", "acme-2", "acme-3", "ci"]
    words = ("new", "--tenant", "b", "--name", "ci", "--file", file)
    assert "--name ci is taken" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-tier", "batch", "--default-tier", "interactive"), "--default-tier"),
        (("--max-tier", "batch", "--default-tier", "standard"), "--default-tier"),
        (("--requests-per-minute", "-5"), "--requests-per-minute must be 1 or more"),
        (("--requests-per-minute", "0"), "--requests-per-minute must be 1 or more; leave it out"),
        (("--tokens-per-minute", "0"), "--tokens-per-minute must be 1 or more"),
        (("--tokens-per-day", "0"), "--tokens-per-day must be 1 or more"),
        (("--max-parallel", "0"), "--max-parallel must be 1 or more"),
        (("--name", "a b"), "--name must be"),
        (("--expires", "2020-01-01"), "--expires lies in the past"),
        (("--expires", "soon"), "--expires must be a span such as 90d"),
        (("--expires", "9999999d"), "--expires must be a span such as 90d"),
        (("--expires", "2027-02-30"), "--expires must be a span such as 90d"),
        (("--expire", "2020"), "--expires"),
    ],
)
def test_what_a_key_cannot_be_is_refused_by_the_right_option(
    file: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in (text := refused(capsys, "new", "--tenant", "acme", "--file", file, *words))
    assert "acme" not in text
    assert not file.exists()


def test_a_list_shows_all_but_what_could_be_used(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tenant", "acme", "--file", file)
    secrets = [
        secret_in(run(capsys, "new", *words, "--expires", "2999-01-31")),
        secret_in(run(capsys, "new", *words, "--name", "slow", "--max-tier", "batch")),
    ]
    old = ApiKey(hash=hash_of("old"), tenant="old")
    late = ApiKey(hash=hash_of("late"), tenant="late", expires=DAY)
    file.write_text(file.read_text() + dump_key(old) + dump_key(late))
    run(capsys, "revoke", "slow", "--file", file)
    table, text = (run(capsys, "list", "--file", file, *more) for more in ((), ("--json",)))
    for shown in (table, text):
        assert not [each for each in (*secrets, *load_keys(file)) if each in shown]
        assert all(secret[:17] in shown for secret in secrets)
    lines = table.splitlines()
    assert lines[0].split()[:6] == ["name", "tenant", "prefix", "state", "created", "expires"]
    assert "2999-01-31 00:00" in lines[1]
    assert old.id in lines[3]
    keys: list[dict[str, Any]] = json.loads(text)["keys"]
    assert [key["state"] for key in keys] == ["active", "revoked", "active", "expired"]
    assert [key["name"] for key in keys] == ["acme", "slow", "", ""]
    assert keys[0]["expires"] == "2999-01-31T00:00:00Z"


def test_an_empty_file_has_an_empty_list(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "keys: []\n", "keys:\n"):
        file.write_text(text)
        assert "holds no keys" in run(capsys, "list", "--file", file)
        assert json.loads(run(capsys, "list", "--json", "--file", file)) == {"keys": []}
        run(capsys, "new", "--tenant", "acme", "--file", file)
        assert len(load_keys(file)) == 1
    assert "cannot read" in refused(capsys, "list", "--file", file.with_name("none.yaml"))


@pytest.mark.parametrize("name", HASHES)
def test_a_revocation_keeps_what_people_wrote(
    by_hand: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_keys(by_hand)
    old = before[HASHES[name]]
    assert "is revoked: gateways" in run(capsys, "revoke", old.id, "--file", by_hand)
    after = load_keys(by_hand)
    new = after.pop(old.hash)
    assert new.revoked is not None
    assert new.model_copy(update={"revoked": None}) == old
    assert after == {key: value for key, value in before.items() if key != old.hash}
    text = by_hand.read_text()
    assert [line for line in BY_HAND.splitlines() if line not in text] == [] or name == "two"
    assert text.count("#") == BY_HAND.count("#")
    assert "is revoked already" in run(capsys, "revoke", old.id, "--file", by_hand)
    assert by_hand.read_text() == text


def test_a_new_key_joins_a_list_by_hand(by_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "new", "--tenant", "fresh", "--file", by_hand)
    assert by_hand.read_text().startswith(BY_HAND)
    assert [key.tenant for key in load_keys(by_hand).values()] == ["acme", "acme", "other", "fresh"]


def test_a_new_key_joins_a_list_in_brackets(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"# ours\nkeys: [{{hash: '{HASHES['one']}', tenant: acme}}]\n")
    run(capsys, "new", "--tenant", "fresh", "--file", file)
    assert [key.tenant for key in load_keys(file).values()] == ["acme", "fresh"]
    assert "# ours" in file.read_text()


def test_a_word_that_names_none_or_several_keys_revokes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        ApiKey(hash=hash_of(name), tenant="t", name=name, prefix=f"sk-aileron-{name}")
        for name in ("abcde", "abcdf")
    ]
    file.write_text("keys:\n" + "".join(map(dump_key, keys)))
    before = file.read_bytes()
    several = refused(capsys, "revoke", "sk-aileron-abc", "--file", file)
    assert "2 keys fit: abcde (sk-aileron-abcde…), abcdf (sk-aileron-abcdf…)" in several
    for word in ("nothing", "abc", "sk", hash_of("x"), ""):
        assert "no key has this name or prefix" in refused(capsys, "revoke", word, "--file", file)
    missing = file.with_name("none.yaml")
    assert "does not exist" in refused(capsys, "revoke", "abcde", "--file", missing)
    assert file.read_bytes() == before
    run(capsys, "revoke", "sk-aileron-abcde", "--file", file)
    run(capsys, "revoke", "sk-aileron-abc", "--file", file)
    assert all(key.revoked for key in load_keys(file).values())


def test_a_key_itself_is_revoked_and_not_repeated(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = secret_in(run(capsys, "new", "--tenant", "acme", "--file", file))
    assert secret not in run(capsys, "revoke", secret, "--file", file)
    assert load_keys(file)[hash_of(secret)].revoked is not None


def test_a_link_to_the_file_stays_a_link(by_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = by_hand.with_name("link.yaml")
    link.symlink_to(by_hand)
    run(capsys, "new", "--tenant", "fresh", "--file", link)
    assert link.is_symlink()
    assert len(load_keys(by_hand)) == 4


def _add_keys(number: int, file: str) -> None:
    for _ in range(5):
        main(["key", "new", "--tenant", f"t{number}", "--file", file])


def test_commands_at_once_lose_no_key(file: Path) -> None:
    workers = [
        multiprocessing.get_context("fork").Process(target=_add_keys, args=(each, str(file)))
        for each in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(load_keys(file)) == 20
    assert len({key.name for key in load_keys(file).values()}) == 20
    assert [each.name for each in file.parent.iterdir()] == [file.name]
