"""The last line on the screen is the reason, and no error of Python's stands in its place."""

import errno
import os
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from comm_pool.layout import Rank
from coordinator.cli.cell import Cell, CellProcess
from coordinator.cli.children import Child, ChildSpec
from coordinator.cli.screen import PlainScreen
from coordinator.protocol.config import ConfigError, check_config, load_config
from coordinator.protocol.failure_reason import reason_of
from worker.launch.launcher import await_probes, fork_rank

NOISE = "print('nanobind: leaked 3 instances!'); print(' - ... skipped remainder')"


async def never() -> bool:
    return False


def failing(action: str) -> BaseException:
    try:
        exec(action, {})
    except Exception as error:  # noqa: BLE001 -- any error may be judged
        return error
    raise AssertionError(action)


@pytest.mark.parametrize(
    "action",
    [
        "a, b = (1, 2, 3)",
        "{}['model.embed']",
        "None.shape",
        "assert 1 == 2",
        "len(1)",
        "import torch; torch.zeros(2) @ torch.zeros(3)",
    ],
)
def test_an_error_that_python_raises_is_no_reason(action: str) -> None:
    error = failing(action)
    reason = reason_of(error)
    assert "the log has the traceback" in reason
    assert type(error).__name__ in reason
    if isinstance(error, ValueError):
        assert "unpack" not in reason


def test_a_kernel_that_the_build_of_vllm_lacks_is_named() -> None:
    pytest.importorskip("vllm")
    error = failing(
        "import torch, vllm._custom_ops as ops; x = torch.zeros(2, 2);"
        "torch.ops._C.static_scaled_fp8_quant(x, x, x, None)"
    )
    reason = reason_of(error)
    assert reason.startswith("this build of vLLM has no kernel static_scaled_fp8_quant for"), error


def test_an_error_that_says_what_is_wrong_is_the_reason() -> None:
    assert reason_of(ConfigError("lower it.")) == "lower it."
    with pytest.raises(RuntimeError) as full:
        raise RuntimeError("No memory for\n  the cache: raise it.")
    assert reason_of(full.value) == "No memory for the cache: raise it."
    assert "--weight-parts" in reason_of(MemoryError())
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    of_torch = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    for error in (no_memory, of_torch):
        assert "lower --kv-cache-memory-bytes" in reason_of(error)
    assert "--shm-size=1g" in reason_of(OSError(errno.ENOSPC, "No space left on device"))

    class Limits(BaseModel):
        count: int

    with pytest.raises(ValidationError) as refused:
        Limits.model_validate({"count": "x"})
    assert reason_of(refused.value).startswith("count must be a valid integer")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print('aileron: too little.'); {NOISE}; raise SystemExit(2)", "too little."),
        (
            'print(\'{"event": "rank_failed", "rank": 1, "reason": "no room."}\'); '
            'print(\'{"event": "rank_failed", "rank": 0, "reason": "a peer is lost."}\'); '
            f"{NOISE}; raise SystemExit(1)",
            "rank 1 failed: no room.",
        ),
        (
            'print(\'{"event": "rank_failed", "rank": 1, "reason": "it was late."}\'); '
            'print(\'{"event": "rank_exited", "rank": 1, "starts_in_s": 1.5}\'); '
            "print('gateway: the port is taken.'); raise SystemExit(2)",
            "the port is taken.",
        ),
        ("raise SystemExit(7)", "worker ended (exit status 7) and gave no reason."),
    ],
)
async def test_a_reason_outlives_the_noise_at_exit(
    code: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = PlainScreen()
    spec = ChildSpec("worker", [sys.executable, "-c", code], {}, tmp_path / "worker.log")
    member = CellProcess(Child(spec, lambda _: None, None), restarts=False, stop_limit_s=5.0)
    cell = Cell([member], screen)
    assert await cell.run(never, lambda: None) == 1
    assert cell.reason == reason
    assert "nanobind" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"gateway": {"prot": 1}}, "unknown setting gateway.prot; did you mean gateway.port?"),
        ({"gatway": {}}, "unknown setting gatway; did you mean gateway?"),
        ({"cell": {"zzz": 1}}, "unknown setting cell.zzz."),
        ({"gateway": {"port": 70_000}}, "gateway.port must be less than or equal to 65535."),
        ({"gateway": {"port": "x"}}, "gateway.port must be a valid integer"),
        ({"model": {}}, "model.path is missing."),
        (
            {"model": None},
            "model must have settings below it: write `model:` and below it, indented, lines such "
            "as `path: …`.",
        ),
        ({"cell": {"layout": "tp3"}}, "cell.layout: "),
        ({"tracing": {"endpoint": "a"}}, "tracing: endpoint must be"),
    ],
)
def test_mistakes_in_a_file(data: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config({"model": {"path": "x"}, **data})
    said = str(refused.value)
    assert said.startswith(sentence)
    for word in ("Value error", "Extra inputs", "Input should", "pydantic", "configuration:"):
        assert word not in said
    file = tmp_path / "cell.yaml"
    file.write_text("model: {path: x}\ngateway: {prot: 1}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert str(refused.value).count(str(file)) == 1


def test_a_rank_s_reason_reaches_the_launcher(tmp_path: Path) -> None:
    """As the launcher gets it: from a forked process, in place of what Python says."""
    three = (1, 2, 3)
    told = tmp_path / "reason"

    def run() -> None:
        _, _ = list(three)

    def tell(reason: str) -> None:
        told.write_text(reason)

    pid = fork_rank(Rank(0), run, tell)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "ValueError in" in told.read_text()
    assert "unpack" not in told.read_text()


def probed(*codes: str) -> tuple[str, list[int]]:
    """What is said of ranks that run these programs; `$` is where they write their reason."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    pids = [
        os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        for code in (each.replace("$", str(writer)) for each in codes)
    ]
    os.close(writer)
    return await_probes({pid: Rank(n) for n, pid in enumerate(pids)}, reader), pids


@pytest.mark.timeout(30)
def test_a_probe_ends_while_others_hold_the_pipe_of_its_ranks() -> None:
    """As the helpers of a compiler do that a rank has started."""
    left = "import subprocess; subprocess.Popen(['sleep', '40'], pass_fds=[$])"
    for code in ("", "; raise SystemExit(3)"):
        reason, _ = probed(left + code)
        assert reason == (
            "rank 0 failed: its process ended with status 3; see the lines above." if code else ""
        )


@pytest.mark.timeout(30)
def test_a_failed_rank_of_a_probe_ends_those_that_wait_for_it() -> None:
    waits = "import time; time.sleep(600)"
    fails = "import os; os.write($, b'rank 1 failed: no room\\nrank 2'); raise SystemExit(1)"
    reason, pids = probed(waits, fails, waits)
    assert reason == "rank 1 failed: no room"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert probed("", "import os; os.write($, b'a warning')")[0] == ""
    killed = "import os; os.kill(os.getpid(), 9)"
    assert "rank 1 failed: its process was ended by SIGKILL" in probed(waits, killed)[0]
