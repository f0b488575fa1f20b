"""A task that vLLM finds wrong: neither the coordinator nor the log is told its words."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

pytest.importorskip("vllm")

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.config import TOKEN_ENV
from coordinator.protocol.logs import set_up_logging
from coordinator.protocol.messages.rank import Place
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.terms import Binding, EndCause
from tests.harness.coordinator.builders import header
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from tests.harness.worker.fake_scheduler import fake_payload
from worker import __main__ as command
from worker.demo import MODEL_DIR
from worker.launch import launcher
from worker.rank import runtime as member_module

pytestmark = pytest.mark.usefixtures("restored_logging")

SECRET = "a secret prompt"
BINDING = Binding(Group((Rank(0),), Mode.DP), 4)


def test_its_words_are_neither_sent_nor_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_logging()
    # A logger keeps for good what it wrote to first, which here is pytest's.
    monkeypatch.setattr(member_module, "log", structlog.get_logger())
    rank = FakeRank(FakeCell())
    rank.serve(BINDING)
    payload = fake_payload(SECRET, (), 9)  # The error quotes its name.
    rank.runtime.place(Place(header("a"), 2, BINDING, payload, (7, 8)), BINDING)
    assert rank.runtime.ended == [TaskEnded(header("a").task, 2, EndCause.FAILED, 2)]
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert SECRET not in str(line)
    assert (line["event"], line["task"]) == ("task_refused", "a")
    [told] = line["exception"]
    assert told["exc_value"] == "ValueError"
    assert told["frames"][-1]["name"] == "request"


def test_the_worker_s_processes_log_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing:
        def __init__(self, _config: Any) -> None:
            """Stands for the launcher."""

        def run(self) -> int:
            local = SECRET
            try:
                raise ValueError(f"{len(local)}")
            except ValueError:
                structlog.get_logger().exception("bad")
            return 0

    path = tmp_path / "cell.yaml"
    path.write_text(json.dumps({"model": {"path": str(MODEL_DIR)}}))
    monkeypatch.setenv(TOKEN_ENV, "a-secret-for-tests-only")
    monkeypatch.setattr(launcher, "Launcher", Failing)
    monkeypatch.setattr(sys, "argv", ["worker", "--config", str(path)])
    for name in (*command.VLLM_ENVIRONMENT, *command.FIXED_ENVIRONMENT):
        monkeypatch.setenv(name, "0")
    assert command.main() == 0
    said = capsys.readouterr()
    assert said.out == ""
    [line] = [json.loads(line) for line in said.err.splitlines()]
    assert line["event"] == "bad"
    assert SECRET not in str(line)
