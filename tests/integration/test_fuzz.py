"""Schemathesis against a real gateway: whatever is sent, no answer is a 5xx.

Each day draws other requests: the seed is the date, or `AILERON_FUZZ_SEED`. It is printed, and a
failure names it.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.http.routes import VLLM_ROUTES
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess
from tests.harness.gateway.short_answers import answer_shortly
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("gateway")]

SEED_ENV = "AILERON_FUZZ_SEED"
SHORT = ("--phases", "fuzzing", "--max-examples", "20")
"""20 drawn requests for each operation, however long they take: ten seconds on two quiet cores."""
LONG = ("--phases", "coverage,fuzzing", "--max-examples", "100")
"""All requests that cover the schema, and 100 more for each operation; takes minutes."""


@pytest.fixture
def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    shared_cell.reset()
    shared_cell.behave = answer_shortly
    return shared_cell


def open_schema() -> dict[str, Any]:
    """vLLM's OpenAPI document, cut down to the routes that are open."""
    from vllm.entrypoints.launchers.app import build_app

    from gateway.engine import app

    config = app.configure(str(MODEL_DIR), "demo", ["--max-model-len", "512"])
    schema: dict[str, Any] = build_app(
        config.args, ("generate",), config.vllm.model_config
    ).openapi()
    schema["paths"] = {
        path: {
            method: operation
            for method, operation in methods.items()
            if (method.upper(), path) in VLLM_ROUTES
        }
        for path, methods in schema["paths"].items()
        if any((method.upper(), path) in VLLM_ROUTES for method in methods)
    }
    return schema


def seed_of_the_day() -> int:
    today = datetime.datetime.now(datetime.UTC).date()
    return int(os.environ.get(SEED_ENV) or today.strftime("%Y%m%d"))


@pytest.mark.parametrize(
    "bound",
    [SHORT, pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_no_request_of_the_schema_is_answered_with_5xx(
    gateway: GatewayProcess, cell: FakeCell, tmp_path: Path, bound: tuple[str, ...]
) -> None:
    path, seed, schema = tmp_path / "openapi.json", seed_of_the_day(), open_schema()
    path.write_text(json.dumps(schema))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", gateway.url),
            *("--checks", "not_a_server_error", *bound, "--workers", "1"),
            *("--suppress-health-check", "all"),
            *("--request-timeout", "20", "--continue-on-failure", "--no-color"),
            *("--seed", str(seed), "--warnings", "off"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6_000:], done.stderr[-2_000:])
    print(f"{SEED_ENV}={seed}")
    assert done.returncode == 0, f"{SEED_ENV}={seed} draws the same requests again"
    cases = max(int(number) for number in re.findall(r"(\d+) generated", done.stdout))
    print("requests:", cases)
    assert cases >= sum(map(len, schema["paths"].values())), "an operation was never asked for"
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
    assert gateway.process.poll() is None
    assert "request_failed" not in gateway.log.read_text()
