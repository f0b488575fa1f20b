"""A minute of schemathesis against a real gateway: whatever is sent, no answer is a 5xx."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.routes import VLLM_ROUTES
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

FUZZ_S = 60
CASES_MIN = 300
"""Fewer requests than this in a minute would say that the server stands still."""


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    made = FakeCell(behave=answer_shortly)
    yield made
    made.close()


@pytest.fixture
def gateway(cell: FakeCell, tmp_path: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path, MODEL_DIR, cell)
    yield process
    process.close()


async def answer_shortly(ran: Ran) -> None:
    """Three tokens, with all log-probabilities that the request asks for."""
    params = ran.request.sampling_params
    asked = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
    most = {name: 5 if top == -1 else top for name, top in asked.items()}
    ran.tokens(0, [300, 301, 302], "length", **most)


def open_schema() -> dict[str, Any]:
    """vLLM's OpenAPI document, cut down to the routes that are open."""
    from vllm.entrypoints.launchers.app import build_app

    from gateway import vllm_app

    config = vllm_app.configure(str(MODEL_DIR), "demo", ["--max-model-len", "512"])
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


def test_no_request_of_the_schema_is_answered_with_5xx(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(open_schema()))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", gateway.url),
            *("--checks", "not_a_server_error", "--max-time", str(FUZZ_S), "--workers", "1"),
            *("--phases", "coverage,fuzzing", "--suppress-health-check", "all"),
            *("--request-timeout", "20", "--continue-on-failure", "--no-color", "--seed", "1"),
            *("--max-examples", "100000", "--warnings", "off"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6_000:], done.stderr[-2_000:])
    assert done.returncode == 0
    cases = max(int(number) for number in re.findall(r"(\d+) generated", done.stdout))
    print("requests:", cases)
    assert cases >= CASES_MIN
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
    assert gateway.process.poll() is None
    assert "request_failed" not in gateway.log.read_text()
