"""`aileron reload` and `aileron status` where `aileron up` follows a file of the user."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from coordinator.cli import main
from coordinator.cli.config_source import ConfigSource, follow, start_following
from coordinator.cli.errors import CliError
from coordinator.protocol.config import Config, ConfigError, load_config
from coordinator.protocol.config_file import ConfigFile
from coordinator.protocol.file_stamp import stamp_of
from coordinator.protocol.messages.gateway import GatewayFiles
from coordinator.server import config_reload
from coordinator.server.config_reload import ConfigReload
from tests.harness.cells.coordinator_process import Coordinator


def build_from(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError as error:
        raise CliError(str(error)) from error


@contextmanager
def following(user: Path, target: Path) -> Iterator[list[str]]:
    """Follow the user's file in a thread, as `aileron up` does beside its processes."""
    said: list[str] = []
    source = ConfigSource(user, lambda: build_from(user), stamp_of(user))
    start_following(source, target)
    loop = asyncio.new_event_loop()
    task = loop.create_task(follow(source, target, said.append))

    def run() -> None:
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield said
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def test_a_reload_means_the_user_s_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    coordinator = Coordinator(tmp_path / "run")
    user = tmp_path / "cell.yaml"
    first: dict[str, Any] = yaml.safe_load(coordinator.file.read_text())
    user.write_text(yaml.safe_dump(first))

    def run(*arguments: str) -> tuple[int, str, str]:
        url = f"http://127.0.0.1:{coordinator.admin}"
        status = main([*arguments, "--admin-url", url])
        said = capsys.readouterr()
        return status, said.out, said.err

    def shown() -> str:
        return run("status", "--once")[1]

    def hash_now() -> str:
        return str(coordinator.get("/admin/status")["config"]["hash"])

    with coordinator.running(), following(user, coordinator.file):
        begun = hash_now()
        read_at = coordinator.get("/admin/status")["config"]["read_at"]
        # The edits come right before the command, as those of a person with a script do.
        for text, sentence in (
            (yaml.safe_dump({**first, "log": {"level": "loud"}}), "log.level"),
            (
                yaml.safe_dump({**first, "cell": {"ranks": 4, "layout": "dp4", "widths": [1]}}),
                "the configuration changes cell.ranks",
            ),
            ("cell:\n  ranks: [", "cell.yaml"),
        ):
            user.write_text(text)
            status, out, err = run("reload")
            assert (status, out) == (1, "")
            assert sentence in err.splitlines()[-1].casefold()
            assert sentence in shown().casefold()
            assert (
                hash_now(),
                coordinator.get("/admin/status")["config"]["read_at"],
            ) == (begun, read_at)
        for goal in (70.0, 80.0):
            user.write_text(yaml.safe_dump({**first, "slo": {"standard": {"ttft_ms": goal}}}))
            status, out, err = run("reload")
            assert (status, err) == (0, "")
            assert hash_now() != begun
            assert out == f"configuration {hash_now()} applies.\n"
            assert "does not apply" not in shown()
            begun = hash_now()
        user.unlink()
        status, _, err = run("reload")
        assert (status, f"cannot read {user}: No such file" in err) == (1, True)


class Owner:
    """What a reload needs of the core's actor."""

    def __init__(self) -> None:
        self.gateway_outboxes: dict[str, object] = {}
        self.gateway_files: dict[str, GatewayFiles] = {}

    async def post(self, _: object) -> None:
        return


@pytest.fixture
def reloading(
    tmp_path: Path, restored_logging: None
) -> tuple[Path, ConfigFile, Owner, ConfigReload]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "demo"}}))
    file = ConfigFile(path, load_config(path), load_config, "coordinator")
    owner: Any = Owner()
    return path, file, owner, ConfigReload(file, owner)


async def test_a_reload_waits_for_the_gateways_that_share_the_file(
    reloading: tuple[Path, ConfigFile, Owner, ConfigReload], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file, owner, reload = reloading
    names = ("own", "gone", "other")
    owner.gateway_outboxes = {"own": SimpleNamespace(), "other": SimpleNamespace()}
    owner.gateway_files = {name: GatewayFiles(file.hash) for name in names}
    owner.gateway_files["other"] = GatewayFiles("of-another-file")
    path.write_text(yaml.safe_dump({"model": {"path": "demo"}, "log": {"requests": 0}}))
    work = asyncio.create_task(reload.reload())
    await asyncio.sleep(0.3)
    assert not work.done()
    owner.gateway_files["own"] = GatewayFiles(file.hash)
    await asyncio.wait_for(work, 5)
    second = file.hash

    owner.gateway_files["own"] = GatewayFiles(file.hash, "it cannot be read.")
    path.write_text(yaml.safe_dump({"model": {"path": "demo"}, "log": {"requests": 1}}))
    with pytest.raises(ConfigError, match=r"1 gateways do not: it cannot be read\."):
        await reload.reload()

    owner.gateway_files["own"] = GatewayFiles(second)
    monkeypatch.setattr(config_reload, "GATEWAYS_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match="have not read it within"):
        await reload.reload()


async def test_a_reload_does_not_wait_for_an_up_that_is_gone(
    reloading: tuple[Path, ConfigFile, Owner, ConfigReload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, _, _, reload = reloading
    user = tmp_path / "cell.yaml"
    user.write_text("a: 1")
    start_following(ConfigSource(user, lambda: load_config(user), stamp_of(user)), path)
    user.write_text("a: 12")
    monkeypatch.setattr(config_reload, "ORIGIN_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=r"`aileron up` has not read .*cell\.yaml within"):
        await reload.reload()
