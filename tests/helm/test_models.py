"""Models that pods download: which files, where they lie, and that it happens once."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from tests.harness.cells.servers import free_port
from tests.helm.charts import CHART, Object, Release, containers_of, releases

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version":"1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00001.safetensors": b"weights" * 1_000,
    "original/consolidated.00.pth": b"the same weights" * 1_000,
}
SERVED = set(FILES) - {"original/consolidated.00.pth"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of-a-user"
LIMIT_S = 100


@contextmanager
def hub(files: dict[str, bytes] = FILES, size: int = 0) -> Iterator[tuple[str, list[str]]]:
    """A hub with one model, at a URL; yields it and the paths that are asked for.

    `size`, if it is not 0, is what the hub says of each file, in bytes.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            asked.append(f"{self.command} {path}")
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, b"{}")
            elif path.startswith("/api/models/acme/model/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": name}
                    for name, data in files.items()
                ]
                self.answer(200, json.dumps(tree).encode())
            elif path.startswith("/api/models/acme/model"):
                siblings = [
                    {"rfilename": name, "size": size or len(data)} for name, data in files.items()
                ]
                facts = {"id": "acme/model", "sha": COMMIT, "siblings": siblings}
                self.answer(200, json.dumps(facts).encode())
            else:
                name = path.partition(f"/resolve/{COMMIT}/")[2]
                self.answer(200, files[name], hashlib.sha256(files[name]).hexdigest())

        def answer(self, status: int, body: bytes, etag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def fetch(
    url: str, folder: Path, files: str, token: str = TOKEN
) -> "subprocess.CompletedProcess[str]":
    """Run the chart's script as an init container does."""
    env = {
        "PATH": os.environ["PATH"],
        "HF_ENDPOINT": url,
        "HF_TOKEN": token,
        "HF_HOME": str(folder.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "MODEL_ID": "acme/model",
        "MODEL_REVISION": "main",
        "MODEL_FOLDER": str(folder),
        "WAIT_SECONDS": "0",
    }
    command = [sys.executable, "-P", str(CHART / "scripts" / "fetch_model.py"), files]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def held(folder: Path) -> set[str]:
    """The model's files in a folder."""
    files = (each.relative_to(folder) for each in folder.rglob("*") if each.is_file())
    return {
        str(each) for each in files if not each.name.startswith(".") and each.parts[0] != ".cache"
    }


def test_a_cell_fetches_all_that_serving_needs_once(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "acme" / "model"
    with hub() as (url, asked):
        first = fetch(url, folder, "all")
        assert first.returncode == 0, first.stdout + first.stderr
        assert held(folder) == SERVED
        for name in SERVED:
            assert (folder / name).read_bytes() == FILES[name]
        asked.clear()
        again = fetch(url, folder, "all")
    assert (again.returncode, asked) == (0, [])
    assert "holds acme/model already" in again.stdout
    # A pod that waits for it finds it, without the network.
    assert fetch(f"http://127.0.0.1:{free_port()}", folder, "wait").returncode == 0


def test_a_gateway_fetches_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with hub() as (url, asked):
        done = fetch(url, folder, "tokenizer")
    assert done.returncode == 0, done.stdout + done.stderr
    assert held(folder) == {name for name in SERVED if "safetensors" not in name}
    assert not [each for each in asked if "safetensors" in each]
    # What a gateway has is not what a cell waits for.
    assert fetch(url, folder, "wait").returncode == 1


def test_a_volume_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with hub(size=1 << 50) as (url, _):
        done = fetch(url, folder, "all")
    assert done.returncode == 1
    assert "raise models.download.size" in done.stdout
    assert not held(folder)


def test_a_hub_that_refuses_or_is_away_ends_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    away = fetch(f"http://127.0.0.1:{free_port()}", folder, "all")
    with hub() as (url, _):
        refused = fetch(url, folder, "all", token="wrong")
    assert (away.returncode, refused.returncode) == (1, 1)
    assert "acme/model cannot be fetched: " in away.stdout
    assert "401" in refused.stdout
    assert not held(folder)


def test_each_cell_has_a_claim_that_its_next_pod_finds() -> None:
    release = releases()["a model for each cell"]
    spec = release.one("StatefulSet", "-cell")["spec"]
    claims = {each["metadata"]["name"]: each["spec"] for each in spec["volumeClaimTemplates"]}
    assert {name: each["resources"]["requests"]["storage"] for name, each in claims.items()} == {
        "models": "200Gi",
        "cache": "100Gi",
    }
    assert claims["cache"]["storageClassName"] == "fast"
    assert all(each["accessModes"] == ["ReadWriteOnce"] for each in claims.values())
    retention = {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert spec["persistentVolumeClaimRetentionPolicy"] == retention
    gateway = release.one("Deployment", "-gateway")["spec"]["template"]["spec"]
    (models,) = [each for each in gateway["volumes"] if each["name"] == "models"]
    assert models == {"name": "models", "emptyDir": {"sizeLimit": "1Gi"}}
    assert downloads(release) == {"chat-aileron-cell": "all", "chat-aileron-gateway": "tokenizer"}


def test_one_job_fills_the_claim_that_pods_share() -> None:
    release = releases()["a model that pods share"]
    claim = release.one("PersistentVolumeClaim", "-models")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (job,) = [each for each in release.of_kind("Job") if "-model-" in each["metadata"]["name"]]
    name = job["metadata"]["name"]
    assert downloads(release) == {
        name: "all",
        "chat-aileron-cell": "wait",
        "chat-aileron-gateway": "wait",
    }
    for workload, pod in release.pods():
        if workload in downloads(release):
            volume = release.volumes(workload, pod)["models"]
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def downloads(release: Release) -> dict[str, str]:
    """Workload -> what its container `model` fetches, for those that have one."""
    found = {}
    for name, pod in release.pods():
        for container in containers_of(pod):
            if container["name"] == "model":
                found[name] = container["command"][-1]
                env: Object = {each["name"]: each.get("value") for each in container["env"]}
                assert env["MODEL_ID"] == release.values["config"]["model"]["path"]
                assert env["MODEL_FOLDER"] == f"/models/{env['MODEL_ID']}"
                assert "HF_HUB_OFFLINE" not in env
                (mount,) = [e for e in container["volumeMounts"] if e["name"] == "models"]
                assert not mount.get("readOnly")
    return found


def test_only_pods_that_download_may_reach_the_network() -> None:
    for name, wanted in (("a model for each cell", True), ("a model that pods share", False)):
        for policy in releases()[name].of_kind("NetworkPolicy"):
            ports = [
                port for rule in policy["spec"].get("egress", []) for port in rule.get("ports", [])
            ]
            downloads_here = wanted and not policy["metadata"]["name"].endswith("-redis")
            assert ({"port": 443, "protocol": "TCP"} in ports) == downloads_here
