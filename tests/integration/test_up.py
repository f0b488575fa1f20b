"""`aileron up` with the demo model on the CPU: from the first line to the last process gone.

They import all by themselves, but for the one that is started as `vllm serve` is: a process that
has imported forks its own (`tests.harness.cells.warm`).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import pytest

from tests.harness.cells.warm import is_wanted, start_module
from worker.demo import MODEL_DIR

START_LIMIT_S = 240
SERVES_WITHIN_S = 60.0
STOP_LIMIT_S = 60
REAPED_LIMIT_S = 10
CHILDREN = ("coordinator", "gateway", "worker")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


class Up:
    """A running `aileron up`, its output so far, and the CLI beside it."""

    def __init__(
        self,
        runtime: Path,
        *arguments: str,
        command: str = "up",
        environment: Mapping[str, str] = MappingProxyType({}),
        warm: bool = False,
    ) -> None:
        own = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR"), str(runtime))
        self._env = {**os.environ, **own, **environment}
        self.runtime = runtime
        self._log = runtime / "up.log"
        warm = warm and is_wanted()
        with self._log.open("wb") as log:
            self.process = start_module(
                "product" if warm else None,
                "tests.harness.cells.warm_up" if warm else "coordinator.cli",
                [command, "--port", "0", "--admin-port", "0", *arguments],
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def _cli(self) -> list[str]:
        return [sys.executable, "-m", "coordinator.cli"]

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until_said(self, pattern: str, limit_s: float = START_LIMIT_S) -> "re.Match[str]":
        deadline = time.monotonic() + limit_s
        while (match := re.search(pattern, self.said)) is None:
            assert self.process.poll() is None, f"it ended early:\n{self.said}"
            assert time.monotonic() < deadline, f"'{pattern}' was not said:\n{self.said}"
            time.sleep(0.1)
        return match

    def cli(self, *arguments: str, status: int = 0) -> str:
        result = subprocess.run(
            [*self._cli, *arguments], capture_output=True, text=True, env=self._env, check=False
        )
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout + result.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self.cli(*arguments, "--json"))

    def children(self) -> dict[str, int]:
        """Package -> pid of each direct child."""
        found = {}
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, listing.split()):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            # A child that was just forked, or ended just now, shows no module.
            if "-m" in words:
                found[words[words.index("-m") + 1]] = pid
        return found

    def descendants(self) -> set[int]:
        """Every process below this one."""
        found: set[int] = set()
        front = [self.process.pid]
        while front:
            pid = front.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                below = {int(word) for word in task.read_text().split()}
                front += below - found
                found |= below
        return found


def stat_of(pid: int) -> str | None:
    """What the kernel says of a process; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextmanager
def up(runtime: Path, *arguments: str, **settings: Any) -> Iterator[Up]:
    running = Up(runtime, *arguments, **settings)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            try:
                running.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up")) as running:
        running.until_said("stop +Ctrl-C")
        yield running


def base_url(running: Up) -> str:
    return running.until_said(r"OpenAI API +(\S+)")[1]


def complete(url: str, tokens: int, **fields: Any) -> Any:
    body = {"model": "aileron-demo", "prompt": "def", "max_tokens": tokens, **fields}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"{url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def serves_after_s(serving: Up) -> float:
    said = re.search(r"serving aileron-demo after (\d+\.\d) s", serving.said)
    assert said is not None
    return float(said[1])


def test_progress_is_shown_and_requests_are_served(serving: Up) -> None:
    for stage in ("loading weights", "preparing modes", "creating communicators", "ready"):
        assert stage in serving.said
    assert serves_after_s(serving) > 0
    assert complete(base_url(serving), 8)["usage"]["completion_tokens"] == 8


def test_logprobs_compile_nothing_at_their_first_request(serving: Up) -> None:
    """A compiler's run, with its file of machine code, took seconds there."""
    answer = complete(base_url(serving), 8, logprobs=2)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 8
    assert not list(serving.runtime.rglob("*.so"))


@pytest.mark.long
def test_it_serves_in_time(serving: Up) -> None:
    assert serves_after_s(serving) < SERVES_WITHIN_S


def test_operator_commands_find_it_by_themselves(serving: Up) -> None:
    status = serving.json("status")
    assert (status["model"], status["gateways"], len(status["ranks"])) == ("aileron-demo", 1, 2)
    assert "layout   dp2" in serving.cli("status")
    assert "tp2 serves" in serving.cli("switch", "tp2")
    assert "tp2 serves already" in serving.cli("switch", "tp2")
    assert serving.json("switch", "dp2", "--carry", "drain")["switch"]["carry"] == "drain"
    assert serving.json("explain", "--last", "1")["decisions"][0]["choice"] == "dp2"
    assert "asked by operator" in serving.cli("explain")
    refused = serving.cli("switch", "tp4", status=1)
    assert "width 4" in refused.lower()


def test_a_killed_coordinator_comes_back_at_the_same_port(serving: Up) -> None:
    before = serving.json("status")
    os.kill(serving.children()["coordinator"], signal.SIGKILL)
    serving.until_said(r"coordinator ended \(SIGKILL\); starting it again", 10)
    deadline = time.monotonic() + 60
    while serving.children().get("coordinator") in (None, before["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while True:
        try:
            after = serving.json("status")
        except AssertionError:
            after = {"serving": False}
        if after["serving"] and after["gateways"] == 1:
            break
        assert time.monotonic() < deadline, after
        time.sleep(0.1)
    assert after["coordinator"] != before["coordinator"]
    assert (after["layout"], after["epoch"]) == (before["layout"], before["epoch"])
    assert complete(base_url(serving), 8)["usage"]["completion_tokens"] == 8


def test_a_killed_gateway_comes_back_at_the_same_port(serving: Up) -> None:
    os.kill(serving.children()["gateway"], signal.SIGKILL)
    serving.until_said(r"gateway ended \(SIGKILL\); starting it again", 10)
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            answer = complete(base_url(serving), 8)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert answer["usage"]["completion_tokens"] == 8


def test_it_stops_in_order_and_leaves_nothing(serving: Up) -> None:
    below = serving.descendants()
    assert set(serving.children()) == set(CHILDREN)
    run_dir = Path(serving.until_said(r"logs in (\S+)")[1])
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(STOP_LIMIT_S) == 0
    assert "killed" not in serving.said
    # Whose parent has ended is reaped by the first process of the machine, a moment later.
    deadline = time.monotonic() + REAPED_LIMIT_S
    while left := [said for pid in below if (said := stat_of(pid)) is not None]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not run_dir.exists()
    assert "start `aileron up`" in serving.cli(
        "status", "--admin-url", "http://127.0.0.1:1", status=1
    )


def test_a_wrong_engine_option_ends_it_with_the_reason(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """vLLM alone compares the threshold with the model's length; its sentence is the last line."""
    options = ("--long-prefill-token-threshold", "999999")
    folder = tmp_path_factory.mktemp("w")  # Sockets have short paths.
    with up(folder, "--", *options) as running:
        assert running.process.wait(START_LIMIT_S) == 1
        last = running.said.rstrip().splitlines()[-1]
        assert last.startswith("aileron: ")
        assert "999999" in last
        assert "Value error" not in last
        assert "logs are kept in" in running.said
        run_dir = Path(running.said.split("logs are kept in ")[1].split()[0])
        assert {path.name for path in run_dir.glob("*.log")} >= {"worker.log", "gateway.log"}


def test_a_cached_model_is_served_without_a_network(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Nobody asks Hugging Face again and again, which took minutes."""
    tmp_path = tmp_path_factory.mktemp("hf")
    repository = tmp_path / "hub" / "models--org--name"
    shutil.copytree(MODEL_DIR, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    options = ("--model", "org/name", "--ranks", "1")
    own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    with up(tmp_path, *options, environment=own) as running:
        running.until_said("Hugging Face does not answer: the model is served from its cache")
        assert complete(base_url(running), 4, model="org/name")["model"] == "org/name"
        logs = "".join(each.read_text() for each in tmp_path.glob("aileron-*/*.log"))
        assert "Retrying" not in logs


def test_serve_as_vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Names, key and sizes of `vllm serve`, asked with OpenAI's client."""
    words = (
        *(str(MODEL_DIR), "--served-model-name", "first", "org/second", "--api-key", "sk-mine"),
        *("--tensor-parallel-size", "2", "--max_model_len", "256"),
    )
    folder = tmp_path_factory.mktemp("s")  # Sockets have short paths.
    with up(folder, *words, command="serve", warm=True) as running:
        url = base_url(running)
        assert running.json("status")["layout"] == "tp2"
        with openai.OpenAI(base_url=url, api_key="sk-mine", max_retries=0) as client:
            assert [each.id for each in client.models.list()] == ["first", "org/second"]
            for name in ("first", "org/second"):
                answer = client.completions.create(model=name, prompt="def", max_tokens=2)
                assert answer.choices[0].finish_reason in ("length", "stop")
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model=str(MODEL_DIR), prompt="def", max_tokens=2)
            with pytest.raises(openai.BadRequestError, match="256"):
                client.completions.create(model="first", prompt=[7] * 300, max_tokens=2)
        with (
            openai.OpenAI(base_url=url, api_key="sk-other", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
    assert "sk-mine" not in running.said
