"""What the chart installs, as processes here: with the commands, environment and files as rendered.

Only hosts, ports and paths are rewritten, because pods have addresses and file systems of their own
and the processes of a test share one; see `rewritten`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.harness.cells.servers import ROOT, free_port
from tests.helm.charts import (
    NAMESPACE,
    Object,
    ask_helm,
    containers_of,
    example,
    merged,
)
from worker.demo import MODEL_DIR

START_LIMIT_S = 900
STOP_LIMIT_S = 90
TOKEN = "a-secret-of-the-release-for-tests"
ADMIN_KEY = "an-admin-key-of-the-release-for-tests"
SECRETS = {
    "token": TOKEN,
    "admin-key": ADMIN_KEY,
    "viewer-key": "a-viewer-key-of-the-release-for-tests",
    "metrics-key": "a-metrics-key-of-the-release-for-tests",
    "url": "redis://is.rewritten.invalid",
}

SMALL: Object = {
    "cells": 2,
    "gateway": {"replicas": 2, "resources": example("kind")["gateway"]["resources"]},
    "cell": {"autoscaling": {"type": "none"}, **example("kind")["cell"]},
    "config": {
        "model": example("kind")["config"]["model"],
        "cell": {**example("kind")["config"]["cell"], "device": "cpu"},
        "policy": {"name": "fixed"},
        "gateway": {"processes": 1},
    },
}
"""What turns the values for many cells of GPUs into two cells that this machine can run."""


class Release:
    """The objects of one rendering."""

    def __init__(self) -> None:
        self.values = merged(example("many-cells"), SMALL)
        (answer,) = ask_helm(self.values)
        assert "error" not in answer, answer["error"]
        self.objects = [
            each
            for path, text in sorted(answer["rendered"].items())
            if not path.endswith("NOTES.txt")
            for each in yaml.safe_load_all(text)
            if each
        ]

    def one(self, kind: str, end: str) -> Object:
        """The only object of a kind whose name ends so."""
        found: Object
        (found,) = [
            each
            for each in self.objects
            if each["kind"] == kind and each["metadata"]["name"].endswith(end)
        ]
        return found

    def containers(self, kind: str, end: str) -> dict[str, Object]:
        """The containers of a workload's pods by name."""
        template: Object = self.one(kind, end)["spec"]["template"]
        return {each["name"]: each for each in containers_of(template)}


class Host:
    """The addresses of this machine that stand for those of pods."""

    def __init__(self, folder: Path, redis: str, pods: list[str]) -> None:
        self.folder = folder
        self.redis = redis
        self.grpc = {pod: free_port() for pod in pods}
        self.admin = {pod: free_port() for pod in pods}
        self.dist = {pod: free_port() for pod in pods}

    def rewritten(self, config: Object, pod: str, keys: Path) -> Object:
        """A rendered configuration with the hosts, ports and paths of this machine, for one pod."""
        port = self.grpc.get(pod, next(iter(self.grpc.values())))
        own: Object = {
            "model": {"path": str(MODEL_DIR)},
            "coordinator": {"listen": f"127.0.0.1:{port}"},
            "cell": {"dist_port": self.dist.get(pod, 0)},
            "fleet": {
                "redis": f"{self.redis}/2",
                "advertise": config["fleet"]["advertise"] and f"127.0.0.1:{port}",
                "cell_name": pod,
            },
            "batches": {"storage": f"{self.redis}/1"},
            "gateway": {"rate_limit_storage": f"{self.redis}/0"},
            "run_dir": "",
        }
        if "admin" in config:
            own["admin"] = {"host": "127.0.0.1", "port": self.admin[pod]}
        if "token_listen" in config["gateway"]:
            files = self.folder / "batches"
            files.mkdir(exist_ok=True)
            own["batches"]["data_dir"] = str(files)
            own["gateway"] |= {
                "host": "127.0.0.1",
                "port": free_port(),
                "token_listen": "tcp://127.0.0.1:0",
                "keys_file": str(keys),
                "metrics_listen": f"127.0.0.1:{free_port()}",
            }
        return merged(config, own)


class Process:
    """A container, as a process group of this machine."""

    def __init__(self, container: Object, config: Object, folder: Path, name: str) -> None:
        self.config = config
        self.log = folder / f"{name}.log"
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        program, role, option, path = container["command"]
        assert (program, option) == ("aileron", "--config")
        assert path.startswith("/etc/aileron/")
        command = [sys.executable, "-m", "coordinator.cli", role, option, str(file)]
        env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        for each in container["env"]:
            secret = each.get("valueFrom", {}).get("secretKeyRef", {})
            # Where the pod has a volume for its caches, the test has its own.
            home = str(folder) if str(each.get("value", "")).startswith("/cache") else None
            env[each["name"]] = home or each.get("value") or SECRETS[secret["key"]]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=folder, process_group=0
            )

    @property
    def url(self) -> str:
        """Where a gateway serves."""
        return f"http://127.0.0.1:{self.config['gateway']['port']}"

    def is_ready(self) -> bool:
        """Ask a gateway as its readiness probe does."""
        assert self.process.poll() is None, self.log.read_text()[-4_000:]
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def terminate(self) -> int:
        """End it as Kubernetes does; returns its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_LIMIT_S)

    def kill(self) -> None:
        """End it and its children at once, as when their host is lost."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Installed:
    """All processes of a release."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.release = Release()
        self.folder = folder
        stateful = self.release.one("StatefulSet", "-cell")
        name = stateful["metadata"]["name"]
        self.cells = [f"{name}-{number}" for number in range(stateful["spec"]["replicas"])]
        self.host = Host(folder, redis, self.cells)
        secret = self.release.one("Secret", "-config")["stringData"]
        self.configs = {file: yaml.safe_load(text) for file, text in secret.items()}
        self.keys = folder / "keys.yaml"
        self.processes: dict[str, list[Process]] = {}

    def start_cell(self, pod: str) -> None:
        """Start a cell's containers."""
        for name, container in self.release.containers("StatefulSet", "-cell").items():
            self._start(pod, name, container)

    def start_gateway(self, pod: str) -> Process:
        """Start a gateway's container."""
        (container,) = self.release.containers("Deployment", "-gateway").values()
        return self._start(pod, "gateway", container)

    def _start(self, pod: str, name: str, container: Object) -> Process:
        file = container["command"][-1].rpartition("/")[2]
        config = self.host.rewritten(self.configs[file], pod, self.keys)
        process = Process(container, config, self.folder, f"{pod}-{name}")
        self.processes.setdefault(pod, []).append(process)
        return process

    def admin(self, pod: str, path: str) -> Any:
        """Ask a cell's admin port, with the release's key."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.host.admin[pod]}{path}")
        request.add_header("Authorization", f"Bearer {ADMIN_KEY}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def is_serving(self, pod: str) -> bool:
        """Whether all ranks of a cell serve."""
        for process in self.processes[pod]:
            assert process.process.poll() is None, process.log.read_text()[-4_000:]
        try:
            return bool(self.admin(pod, "/admin/layout")["serving"])
        except (urllib.error.URLError, OSError):
            return False

    def kill(self, pod: str) -> None:
        """Lose a pod with everything in it."""
        for process in self.processes.pop(pod):
            process.kill()

    def close(self) -> None:
        """Leave nothing running."""
        for pod in list(self.processes):
            self.kill(pod)


def wait_until(condition: Any, what: str) -> None:
    """Wait for something that takes as long as it takes."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {START_LIMIT_S} s"
        time.sleep(0.2)


__all__ = ["NAMESPACE", "Installed", "Process", "wait_until"]
