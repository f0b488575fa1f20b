"""The whole product as a user starts it: `aileron up` on free ports, and a few calls to it."""

import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator.cli.launch import DEMO_ENGINE_ARGS, DEMO_MODEL, DEMO_NAME
from tests.harness.cells.admin import get_json, switch
from tests.harness.cells.not_started import NotStartedError
from tests.harness.cells.servers import ROOT, free_port
from tests.harness.cells.warm import is_wanted, start_module

START_LIMIT_S = 180
MODEL_NAME = DEMO_NAME
"""The demo model's name on the API."""


@dataclass
class Product:
    """A running `aileron up`."""

    process: "subprocess.Popen[bytes]"
    port: int
    admin_port: int
    log_file: Path
    schemes: tuple[str, str] = ("http", "http")
    """Of the serving port and the admin port."""

    @property
    def url(self) -> str:
        """Base URL of the serving port."""
        return f"{self.schemes[0]}://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        """Base URL of the admin port."""
        return f"{self.schemes[1]}://127.0.0.1:{self.admin_port}"

    def log(self) -> str:
        """What `aileron up` printed, with its children's lines."""
        return self.log_file.read_text()

    def get(self, path: str) -> Any:
        """GET on the admin port."""
        return get_json(self.admin + path)

    def switch(self, layout: str, carry: str) -> Any:
        """Switch and wait until the layout serves."""
        return switch(self.admin, layout, carry)

    def pages_free_and_leased(self) -> list[dict[str, Any]]:
        """The page accounting of every rank."""
        return [dict(rank["pages"]) for rank in self.get("/admin/ranks")["ranks"]]

    def child(self, module: str) -> int:
        """Pid of the child process that runs `python -m MODULE`."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # Of a forked one it is a single text.
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").split()
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if parent == self.process.pid and module.encode() in command:
                return int(entry.name)
        raise AssertionError(f"no child runs {module}:\n{self.log()[-2000:]}")


@contextmanager
def product(
    folder: Path,
    *,
    ranks: int,
    engine_args: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    warm: bool = True,
) -> Iterator[Product]:
    """Run `aileron up` with the demo model for the length of the block.

    Where it is not `warm`, its processes import all by themselves.
    """
    config: dict[str, Any] = {
        "model": {
            "path": str(DEMO_MODEL),
            "served_name": DEMO_NAME,
            "engine_args": list(DEMO_ENGINE_ARGS),
        },
        **(settings or {}),
    }
    config["coordinator"] = {
        "listen": f"127.0.0.1:{free_port()}",
        **config.get("coordinator", {}),
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    options = ["--config", str(folder / "base.yaml"), "--ranks", str(ranks), "--device", "cpu"]
    schemes = tuple(
        "https" if config.get(section, {}).get("tls_cert_file") else "http"
        for section in ("gateway", "admin")
    )
    with started(folder, options, engine_args or [], warm=warm, schemes=schemes) as running:
        yield running


@contextmanager
def started(
    folder: Path,
    options: Sequence[str],
    engine_args: Sequence[str] = (),
    *,
    warm: bool = True,
    schemes: tuple[str, ...] = ("http", "http"),
) -> Iterator[Product]:
    """Run `aileron up` with these options on free ports for the length of the block."""
    warm = warm and is_wanted()
    port, admin_port = free_port(), free_port()
    words = [
        *("up", *options, "--verbose"),
        *("--port", str(port), "--admin-port", str(admin_port), "--", *engine_args),
    ]
    own = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), str(folder))
    log_file = folder / "up.log"
    with log_file.open("wb") as log:
        process = start_module(
            "product" if warm else None,
            "tests.harness.cells.warm_up" if warm else "coordinator.cli",
            words,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    running = Product(process, port, admin_port, log_file, (schemes[0], schemes[1]))
    try:
        _wait_ready(running)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(running: Product) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise NotStartedError(running.log()[-4000:])
        try:
            ready = urllib.request.urlopen(running.url + "/ready", timeout=2, context=unverified)
            with ready as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise NotStartedError(f"not ready after {START_LIMIT_S} s:\n{running.log()[-4000:]}")
