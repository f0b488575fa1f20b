"""A real Prometheus, the one of the machine, over files of rules and one port."""

import math
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from coordinator.cli.ports import free_ports
from tests.harness.admin import get_json


@contextmanager
def prometheus(port_to_scrape: int, rules: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run one that scrapes a port of loopback every second; yields its URL."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [
            {
                "job_name": "aileron",
                "static_configs": [{"targets": [f"127.0.0.1:{port_to_scrape}"]}],
            }
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


def answer_of(url: str, text: str) -> list[float]:
    """Finite values of an instant query; [] while Prometheus starts."""
    path = "/api/v1/query?" + urllib.parse.urlencode({"query": text})
    try:
        said = get_json(url + path)
    except OSError:
        return []
    values = [float(each["value"][1]) for each in said["data"]["result"]]
    return [each for each in values if math.isfinite(each)]
