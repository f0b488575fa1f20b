"""The configuration file of a running process: what applies, what is refused, what is said."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from coordinator.cli.config_source import ConfigSource, follow, start_following, write_config
from coordinator.cli.errors import CliError
from coordinator.protocol.config import Config, ConfigError, check_config, load_config
from coordinator.protocol.config_file import (
    NOT_RELOADABLE,
    RELOADABLE,
    ConfigFile,
    RestartNeededError,
    change_between,
    hash_of_config,
)
from coordinator.protocol.config_origin import ConfigOrigin, read_origin
from coordinator.protocol.file_stamp import stamp_of


def config(**sections: Any) -> Config:
    return check_config({"model": {"path": "demo"}, **sections})


def write(path: Path, **sections: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump({"model": {"path": "demo"}, **sections}))
    fresh.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    write(path)
    return path


@pytest.fixture
def file(path: Path) -> ConfigFile:
    return ConfigFile(path, load_config(path), load_config, "coordinator")


def test_settings_are_compared_by_name() -> None:
    new = config(
        slo={"standard": {"ttft_ms": 1}},
        policy={"name": "adaptive", "batch": {"weight": 3}},
        coordinator={"tiers": {"batch": {"queue_tasks_max": 7, "wait_ms": 9}}, "lease_ms": 9_000},
        log={"level": "error", "format": "console"},
        gateway={"media_domains": ["example.com"]},
    )
    change = change_between(config(), new)
    assert set(change.reloadable) == {
        *("slo.standard.ttft_ms", "policy.batch.weight", "log.level"),
        *("coordinator.tiers.batch.queue_tasks_max", "coordinator.tiers.batch.wait_ms"),
    }
    assert set(change.others) == {
        *("policy.name", "coordinator.lease_ms", "log.format", "gateway.media_domains"),
    }
    assert not any(vars_of(change_between(new, new)))
    assert hash_of_config(new) != hash_of_config(config()) == hash_of_config(config())


def vars_of(change: Any) -> tuple[Any, Any]:
    return change.reloadable, change.others


@pytest.mark.parametrize("name", [*RELOADABLE, *NOT_RELOADABLE])
def test_names_of_settings_exist(name: str) -> None:
    value: Any = config().model_dump()
    for part in name.split("."):
        value = value[part]


def test_a_changed_file_is_read_once(file: ConfigFile, path: Path) -> None:
    assert file.poll() is None
    before = file.read_s
    write(path, slo={"standard": {"ttft_ms": 77}})
    with capture_logs() as lines:
        new = file.poll()
    assert new is not None
    assert (file.config, file.refusal) == (new, "")
    assert new.slo.standard.ttft_ms == 77
    assert file.read_s > before
    assert file.poll() is None
    assert file.poll(forced=True) == new
    [line] = lines
    assert (line["event"], line["process"]) == ("config_read", "coordinator")
    assert line["changed"] == ["slo.standard.ttft_ms"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cell": {"ranks": 3, "layout": "dp3"}, "slo": {"batch": {"ttft_ms": 5}}}, "cell.ranks"),
        ({"slo": {"standard": {"ttft_ms": -1}}}, "slo.standard.ttft_ms"),
        ({"polciy": {}}, "polciy"),
    ],
)
def test_an_unusable_file_changes_nothing(
    file: ConfigFile, path: Path, sections: dict[str, Any], words: str
) -> None:
    before = file.config
    write(path, **sections)
    with capture_logs() as lines:
        assert file.poll() is None
    assert file.config is before
    assert words in file.refusal
    assert [(line["event"], line["reason"]) for line in lines] == [("config_refused", file.refusal)]
    assert file.poll() is None, "it is refused once"
    write(path)
    assert file.poll() == before
    assert not file.refusal


def test_settings_that_need_a_restart_are_named(file: ConfigFile, path: Path) -> None:
    write(path, cell={"ranks": 4, "layout": "dp4"}, log={"level": "error"})
    with pytest.raises(RestartNeededError) as error:
        file.load()
    assert error.value.fields == ("cell.ranks", "cell.layout")
    assert "restart" in str(error.value)
    assert "log.level" not in str(error.value)


def test_a_file_that_is_gone_changes_nothing(file: ConfigFile, path: Path) -> None:
    path.unlink()
    assert file.poll() is None
    with pytest.raises(ConfigError):
        file.load()


async def test_a_run_follows_the_user_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cli.config_source.CHECK_EVERY_S", 0.01)
    source, target = tmp_path / "own.yaml", tmp_path / "config.yaml"
    write(source)
    write_config(target, config())
    said: list[str] = []

    def build() -> Config:
        try:
            return load_config(source)
        except ConfigError as error:
            raise CliError(str(error)) from error

    def origin() -> ConfigOrigin:
        found = read_origin(target)
        assert found is not None
        return found

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)

    followed = ConfigSource(source, build, stamp_of(source))
    start_following(followed, target)
    following = asyncio.create_task(follow(followed, target, said.append))
    await asyncio.sleep(0.05)
    write(source, log={"level": "error"})
    await until(lambda: load_config(target).log.level == "error")
    assert target.stat().st_mode & 0o777 == 0o600
    write(source, log={"level": "loud"})
    await until(lambda: bool(said))
    assert "log.level" in said[0]
    assert load_config(target).log.level == "error"
    await until(lambda: "log.level" in origin().refusal)
    assert (origin().file, origin().is_read) == (str(source), True)
    write(source, log={"level": "error"})
    await until(lambda: origin().is_read and not origin().refusal)
    following.cancel()
    start_following(None, target)
    assert read_origin(target) is None


def test_words_that_yaml_takes_for_truth_values_are_words(path: Path) -> None:
    path.write_text("model: {path: m}\ncell: {peer_access: off}\ncoordinator: {precopy: on}\n")
    found = load_config(path)
    assert (found.cell.peer_access, found.coordinator.precopy) == ("off", "on")


def test_without_peer_access_no_rank_borrows() -> None:
    parts = {"ranks": 2, "weight_parts": 2, "layout": "tp2", "peer_access": "off"}
    assert not config(cell={**parts, "borrow": "none"}).borrows
    with pytest.raises(ConfigError, match=r"peer_access is off.*--borrow none"):
        config(cell={**parts, "borrow": "ffn"})
