"""A real Prometheus, the one of the machine, over files of rules and one port."""

import math
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from coordinator.cli.ports import free_ports
from tests.harness.cells.admin import get_json

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="NOT RUN: prometheus and promtool are not on PATH; queries were only parsed.",
)

TARGET_LABELS = {
    "namespace": "chat",
    "pod": "chat-cell-0",
    "service": "chat-admin",
    "endpoint": "admin",
    "container": "coordinator",
}
"""What a ServiceMonitor adds to `job` and `instance` of all that is scraped."""


@contextmanager
def prometheus(
    port_to_scrape: int, rules: Sequence[Path], folder: Path, gateway_port: int = 0
) -> Iterator[str]:
    """Run one that scrapes ports of loopback every second, as on Kubernetes; yields its URL.

    `gateway_port` is that of a gateway's own metrics; 0 is none.
    """
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [
            {
                "job_name": "aileron",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port_to_scrape}"], "labels": TARGET_LABELS}
                ],
            },
            *([gateways_job(gateway_port)] if gateway_port else []),
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def gateways_job(port: int) -> dict[str, object]:
    """How a gateway is scraped, with the labels that a PodMonitor adds."""
    labels = {"namespace": "chat", "pod": "chat-gateway", "container": "gateway"}
    targets = [{"targets": [f"127.0.0.1:{port}"], "labels": labels}]
    return {"job_name": "gateways", "static_configs": targets}


def values_of(url: str, selector: str, label: str) -> list[str]:
    """Values that a label has in some series, sorted; [] while Prometheus starts."""
    asked = urllib.parse.urlencode({"match[]": selector})
    try:
        said = get_json(f"{url}/api/v1/label/{label}/values?{asked}")
    except OSError:
        return []
    return sorted(said["data"])


def answer_of(url: str, text: str) -> list[float]:
    """Finite values of an instant query; [] while Prometheus starts."""
    path = "/api/v1/query?" + urllib.parse.urlencode({"query": text})
    try:
        said = get_json(url + path)
    except OSError:
        return []
    values = [float(each["value"][1]) for each in said["data"]["result"]]
    return [each for each in values if math.isfinite(each)]
