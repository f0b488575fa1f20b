"""The command line without children: options, configuration, ports, records, tables."""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from comm_pool import ports
from coordinator.cli import main, operate
from coordinator.cli.arguments import LOG_FORMATS, LOG_LEVELS, parse_arguments
from coordinator.cli.errors import CliError
from coordinator.cli.last_run import (
    DEFAULT_ADMIN_URL,
    LastRun,
    find_admin_url,
    read_record,
    record_path,
    remove_record,
    write_record,
)
from coordinator.cli.launch import DEMO_NAME, Machine, build_config
from coordinator.cli.ports import free_ports, require_free
from coordinator.cli.restarts import LONGEST_DELAY_S, QUICK_FAILURES_MAX, STEADY_S, Restarts
from coordinator.cli.screen import RankProgress, read_rank_progress
from coordinator.cli.tables import format_table
from coordinator.cli.up import TerminalFilter
from coordinator.protocol.config import Config, ConfigError, dump_config, load_config
from coordinator.protocol.log_config import LEVELS
from coordinator.protocol.log_options import FORMATS


def options(*arguments: str) -> argparse.Namespace:
    return parse_arguments(["up", *arguments])


def build(*arguments: str, gpus: int = 0) -> Config:
    machine = Machine(gpus, (20_001, 20_002, 20_003, 20_004), "/tmp/run", "/tmp/state")
    return build_config(options(*arguments), machine)


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


# A cell from options


def test_defaults_are_two_cpu_ranks_with_the_demo_model() -> None:
    config = build()
    assert (config.cell.device, config.cell.ranks, config.cell.layout) == ("cpu", 2, "dp2")
    assert config.cell.widths == (1, 2)
    assert config.served_model_name == DEMO_NAME
    assert config.coordinator.listen == "127.0.0.1:20001"
    assert config.cell.dist_port == 20_002
    assert (config.gateway.port, config.admin.port) == (8000, 8001)
    assert config.run_dir == "/tmp/run"
    assert config.batches.data_dir == f"/tmp/state/batches/{DEMO_NAME}"


@pytest.mark.parametrize(("ranks", "widths"), [(3, (1,)), (4, (1, 2, 4)), (6, (1, 2))])
def test_groups_are_those_into_which_ranks_can_be_divided(
    ranks: int, widths: tuple[int, ...]
) -> None:
    assert build("--ranks", str(ranks)).cell.widths == widths


def test_every_gpu_is_used_by_default() -> None:
    config = build(gpus=4)
    assert (config.cell.device, config.cell.ranks, config.cell.layout) == ("cuda", 4, "dp4")
    assert config.cell.widths == (1, 2, 4)


def test_options_are_taken() -> None:
    config = build(
        *("--model", "org/name", "--ranks", "4", "--device", "cpu", "--widths", "1,2"),
        *("--layout", "tp2+dp2", "--host", "::1", "--port", "0", "--admin-port", "0"),
        *("--", "--max-model-len", "512"),
    )
    assert (config.model.path, config.served_model_name) == ("org/name", "org/name")
    assert config.model.engine_args == ("--max-model-len", "512")
    assert (config.cell.widths, config.cell.layout) == ((1, 2), "tp2+dp2")
    assert (config.gateway.host, config.gateway.port, config.admin.port) == ("::1", 20_003, 20_004)


def test_mixed_groups_are_those_named_and_those_of_the_layout() -> None:
    assert build("--ranks", "8").mixed_groups() == ()
    config = build("--ranks", "8", "--layout", "shift2tp2+dp4", "--mixed", "sp4tp2,sp2tp4")
    assert [str(each) for each in config.mixed_groups()] == ["sp2tp2", "sp2tp4", "sp4tp2"]


def test_options_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cell.yaml"
    file.write_text(
        "model: {path: a/b, engine_args: [--seed, '1']}\n"
        "cell: {ranks: 4, widths: [1, 2, 4], layout: tp4}\n"
        "coordinator: {listen: '127.0.0.1:9'}\n"
        "run_dir: /tmp/mine\n"
    )
    kept = build("--config", str(file))
    assert (kept.cell.ranks, kept.cell.layout) == (4, "tp4")
    assert (kept.coordinator.listen, kept.run_dir) == ("127.0.0.1:9", "/tmp/mine")
    changed = build("--config", str(file), "--ranks", "2", "--", "--seed=2")
    assert (changed.cell.ranks, changed.cell.layout, changed.cell.widths) == (2, "dp2", (1, 2))
    assert changed.model.engine_args == ("--seed", "1", "--seed=2")


def test_written_file_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = build("--ranks", "4", "--layout", "tp4")
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "tp3"], "width 3"),
        (["--layout", "dp9"], "--layout: layout 'dp9' covers more than 2 ranks"),
        (["--layout", "pp2", "--weight-parts", "2"], "pp2 is a pipeline group, which needs all"),
        (["--ranks", "4", "--widths", "1,4", "--layout", "pp2tp2"], "'pp2tp2' sums in groups of 2"),
        (["--pipelines", "tp2"], "^--pipelines: 'tp2' is not a pipeline group, such as 'pp2'"),
        (["--ranks", "4", "--widths", "1,4", "--pipelines", "pp2"], "needs groups 2 wide"),
        (["--ranks", "0"], "at least one rank"),
        (["--ranks", "200"], "less than or equal to 64"),
        (["--widths", "1,x"], "no list of numbers"),
        (["--widths", "1,3"], "3 is no power of two"),
        (["--widths", "4"], "between 1 and 2"),
        (["--ranks", "4", "--mixed", "sp4"], "--mixed: 'sp4' is not a mixed group"),
        (["--mixed", "sp2tp2"], "--mixed: sp2tp2 needs groups 4 wide"),
        (["--ranks", "4", "--widths", "1,4", "--mixed", "sp2tp2"], "needs groups 2 wide"),
        (["--ranks", "3", "--widths", "1,2"], "groups of 2: use --widths 1, or another"),
        (["--ranks", "6", "--widths", "1,2,4"], "groups of 4: use --widths 1,2, or another"),
        (["--port", "70000"], "^--port must be less than or equal to 65535"),
        (["--admin-port", "-1"], "^--admin-port must be greater than or equal to 0"),
        (["--gateways", "0"], "^--gateways must be greater than or equal to 1"),
        (["--device", "cpu", "--ranks-per-device", "2"], "only GPUs are shared so"),
        (["--device", "cuda"], "nvidia-smi lists no GPU"),
        (["--config", "absent.yaml"], "cannot read absent.yaml"),
        (["--", "--tensor-parallel-size", "2"], "use --ranks, --widths and --layout"),
        (["--", "--port=1"], "--port before the --"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(CliError, match=sentence) as refused:
        build(*arguments)
    assert refused.value.status == 2
    assert "\n" not in str(refused.value)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(CliError, match="lists 2"):
        build("--ranks", "4", gpus=2)


def test_ranks_may_share_gpus_if_that_is_asked_for() -> None:
    config = build("--ranks", "4", "--ranks-per-device", "2", gpus=2)
    assert config.cell.ranks == 4
    assert config.cell.ranks_per_device == 2
    with pytest.raises(CliError, match=r"5 ranks need 3 GPUs.*--ranks-per-device"):
        build("--ranks", "5", "--ranks-per-device", "2", gpus=2)


HALVES_ALONE = ("--weight-parts", "2", "--borrow", "none")


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        (("--ranks", "4", "--weight-parts", "2"), "shift2tp2"),
        (("--ranks", "4", "--weight-parts", "4"), "tp4"),
        (("--ranks", "8", "--widths", "1,2,4", "--weight-parts", "2"), "shift2tp2+shift2tp2"),
        (("--ranks", "4", "--weight-parts", "2", "--layout", "tp4"), "tp4"),
        (("--ranks", "4", "--weight-parts", "1"), "dp4"),
    ],
)
def test_ranks_with_parts_of_the_weights_begin_in_groups_that_have_all(
    arguments: tuple[str, ...], layout: str
) -> None:
    config = build(*arguments)
    assert config.cell.layout == layout
    parts, widest = config.cell.weight_parts, max(config.cell.widths)
    assert config.narrowest == 1, "ranks borrow the other parts"
    assert config.copy_width == (widest if parts > 1 else 1)
    alone = build(*arguments, "--borrow", "none")
    assert alone.cell.layout == layout
    assert alone.narrowest == (widest if parts > 1 else 1)
    wanted = [f"sp{widest // parts}tp{parts}"] if 1 < parts < widest else []
    assert [str(each) for each in config.mixed_groups()] == wanted


@pytest.mark.parametrize("layout", ["dp4", "sp4", "shift4", "shift2tp2", "tp4"])
def test_ranks_that_borrow_begin_alone_or_in_the_widest_groups(layout: str) -> None:
    arguments = ("--ranks", "4", "--weight-parts", "2", "--layout", layout)
    config = build(*arguments, "--policy", "adaptive", "--whole-layers", "2")
    assert config.cell.layout == layout
    assert (config.cell.borrow, config.cell.whole_layers, config.borrows) == ("ffn", 2, True)
    assert build(*arguments, "--borrow", "all").cell.borrow == "all"
    assert build(*arguments, "--whole-layers", "auto").cell.whole_layers == "auto"
    assert build(*arguments, "--whole-layers", "5,0,3,0").cell.whole_layers == (5, 0, 3, 0)


def test_options_override_how_the_ranks_of_a_file_borrow(tmp_path: Path) -> None:
    file = tmp_path / "cell.yaml"
    cell = "{ranks: 4, widths: [1, 2, 4], layout: tp4, weight_parts: 2, whole_layers: auto}"
    file.write_text(f"model: {{path: a-model}}\ncell: {cell}\n")
    assert build("--config", str(file)).cell.whole_layers == "auto"
    changed = build("--config", str(file), "--borrow", "all", "--whole-layers", "0").cell
    assert (changed.borrow, changed.whole_layers, changed.layout) == ("all", 0, "tp4")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--weight-parts", "2", "--ranks", "4", "--layout", "tp2+dp2"),
            "serve alone or in groups",
        ),
        (("--weight-parts", "4", "--ranks", "4", "--layout", "sp2tp2"), "a multiple of"),
        (("--weight-parts", "3"), "a power of two"),
        (("--weight-parts", "8"), "a power of two up to the widest group"),
        (("--weight-parts", "2", "--widths", "1,4"), "exchanges heads in groups of 2"),
        (
            ("--ranks", "6", "--layout", "dp6", "--widths", "1,2,4", "--weight-parts", "2"),
            "6 cannot be divided into groups of 4",
        ),
        (("--whole-layers", "2"), "ranks read no layers from each other"),
        (("--weight-parts", "2", "--borrow", "none", "--whole-layers", "auto"), "read no layers"),
        (("--weight-parts", "2", "--whole-layers", "-1"), "greater than or equal to 0"),
        (
            ("--weight-parts", "2", "--ranks", "4", "--whole-layers", "5,0"),
            r"has 2 numbers for 4 ranks: give one for each rank \(--whole-layers 64,0\)",
        ),
        ((*HALVES_ALONE, "--layout", "dp4"), "only groups that are 4 wide, such as tp4, or let "),
        (
            (*HALVES_ALONE, "--ranks", "4", "--layout", "sp4"),
            r"sp4 needs all of the weights on each rank.*use tp4 or a mixed mode, or let ranks",
        ),
        ((*HALVES_ALONE, "--ranks", "4", "--layout", "shift4"), "shift4 needs all of the weights"),
        ((*HALVES_ALONE, "--layout", "tp2+tp2"), r"ranks borrow \(--borrow ffn\)"),
        (
            (*HALVES_ALONE, "--policy", "adaptive"),
            r"choose from .* let ranks borrow \(--borrow ffn",
        ),
    ],
)
def test_parts_of_the_weights_that_no_group_can_serve_with(
    arguments: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises((CliError, ConfigError), match=sentence):
        build("--ranks", "4", *arguments)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fly"], "`aileron` has no command 'fly'. See `aileron --help`."),
        (["swich"], "`aileron` has no command 'swich'; did you mean switch?"),
        (["key", "lst"], "`aileron key` has no command 'lst'; did you mean list?"),
        (["up", "--ranks", "two"], "--ranks takes a whole number, not 'two'."),
        (["up", "--host-kv", "much"], "--host-kv: 'much' is neither a number nor auto"),
        (["up", "--ranks"], "--ranks needs a value."),
        (["up", "--verbose=yes"], "--verbose takes no value: leave out 'yes'."),
        (["up", "--borrow", "heads"], "--borrow cannot be 'heads': use one of none, ffn, all."),
        (["up", "--policy", "adaptve"], "--policy cannot be 'adaptve'; did you mean adaptive?"),
        (["up", "--device", "gpu"], "--device cannot be 'gpu': use one of auto, cpu, cuda."),
        (["renew", "two"], "RANK takes a whole number, not 'two'."),
        (["usage", "--lst", "3"], "has no option --lst; did you mean --last?"),
        (["status", "--sinse", "3"], "has no option --sinse. See"),
        (["plan"], "name the model: aileron plan MODEL."),
        (["plan", "a/b", "--model", "c/d"], "a/b and c/d: name one model."),
        (["doctor", "--ranks", "0"], "--ranks 0: use at least one rank."),
        (["doctor", "--device", "cuda"], "nvidia-smi lists no GPU"),
        (["up", "--whole-layers", "most"], "'most' is neither numbers nor auto"),
        (["switch"], "LAYOUT is missing"),
        (["key", "list"], "--file is missing"),
        (["switch", "tp2", "--carry", "teleport"], "teleport"),
        (["status", "--", "--seed", "1"], "belong to `aileron up`"),
        (["gateway"], "--config"),
    ],
)
def test_bad_command_lines_end_with_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("aileron: ")
    assert said.count("\n") == 1


def test_policy_is_fixed_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert build().policy.name == "fixed"
    log, times = tmp_path / "seen.jsonl", tmp_path / "times.yaml"
    adaptive = ("--policy", "adaptive", "--observation-log", str(log), "--step-times", str(times))
    policy = build(*adaptive).policy
    assert (policy.name, policy.observation_log) == ("adaptive", str(log))
    assert policy.step_times == str(times)
    with pytest.raises(CliError, match="belong to --policy adaptive"):
        build("--observation-log", str(log))


@pytest.mark.parametrize("url", ["http://[bad", "http://a:99999", "ftp://a", "http://", "a:b:c"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--once", "--admin-url", url]) == 2
    said = capsys.readouterr().err
    assert said.endswith(" is no address: use one such as http://127.0.0.1:8001.\n")


def test_status_without_a_server_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["status", "--admin-url", f"http://127.0.0.1:{port}"]) == 1
    assert "start `aileron up`" in capsys.readouterr().err


LIBRARIES = "import httpx, pydantic, structlog, yaml"
START_TIMES_MAX = 3
"""Limit of the command's processor time, in multiples of what its libraries need alone."""


def processor_s(code: str) -> float:
    """Return what a process that runs this takes of a core."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def test_command_starts_fast_and_without_the_engine() -> None:
    command = "import sys, coordinator.cli, coordinator.cli.operate, coordinator.cli.up\n"
    assert processor_s(command) < START_TIMES_MAX * processor_s(LIBRARIES)
    code = (
        f"{command}"
        "print(sorted({'torch', 'vllm', 'numpy', 'grpc', 'fastapi'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# Ports


def test_port_in_use_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            require_free("127.0.0.1", port, "--port")


def test_unknown_host_is_named() -> None:
    with pytest.raises(CliError, match="no address of this machine"):
        require_free("no.such.host.invalid", 80, "--port")


def test_up_refuses_a_taken_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port), "--admin-port", "0"]) == 1
    said = capsys.readouterr().err
    assert f"port {port}" in said
    assert "--port" in said


def test_free_ports_differ() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    for port in found:
        require_free("127.0.0.1", port, "")


def test_ports_are_not_given_out_twice_before_their_owners_bind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "_ephemeral_range", lambda: (ports.LOW_PORT + 150, 65_535))
    one_by_one = [free_ports(1)[0] for _ in range(ports.REMEMBERED_MAX)]
    assert len(set(one_by_one)) == ports.REMEMBERED_MAX


# Where the last run is


def test_last_run_is_found_while_it_lives() -> None:
    assert find_admin_url(None) == DEFAULT_ADMIN_URL
    run = LastRun(os.getpid(), "http://127.0.0.1:9", "http://127.0.0.1:8/v1", "/tmp/x")
    write_record(run)
    assert read_record() == run
    assert find_admin_url(None) == "http://127.0.0.1:9"
    assert find_admin_url("http://other/") == "http://other"
    remove_record(pid=1)
    assert read_record() == run
    remove_record(os.getpid())
    assert read_record() is None


def test_record_of_a_dead_process_is_ignored() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_record(LastRun(ended.pid, "http://127.0.0.1:9", "", ""))
    assert find_admin_url(None) == DEFAULT_ADMIN_URL


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "\0"])
def test_damaged_record_is_ignored(text: str) -> None:
    record_path().parent.mkdir(parents=True)
    record_path().write_text(text)
    assert read_record() is None


# Restarts, progress, tables


def test_restarts_wait_longer_and_end() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after(1.0) for _ in range(QUICK_FAILURES_MAX + 1)]
    assert delays[:3] == [0.2, 0.4, 0.8]
    assert delays[-1] is None
    assert all(delay is not None and delay <= LONGEST_DELAY_S for delay in delays[:-1])


def test_a_long_run_is_forgiven() -> None:
    restarts = Restarts()
    for _ in range(QUICK_FAILURES_MAX):
        restarts.delay_after(1.0)
    assert restarts.delay_after(STEADY_S + 1) == 0.2


def test_rank_progress_is_read_and_other_lines_are_not() -> None:
    line = '{"event":"rank_progress","rank":1,"stage":"weights","done":3,"total":9}'
    assert read_rank_progress(json.loads(line)) == RankProgress(1, "weights", 3, 9)
    assert read_rank_progress({"event": "gateway_ready"}) is None
    assert read_rank_progress({"event": "rank_progress", "rank": "x", "stage": "kv"}) is None
    assert read_rank_progress({"event": "rank_progress", "rank": 0, "stage": "kv"}) == (
        RankProgress(0, "kv", 0, 0)
    )


def test_table_aligns() -> None:
    table = format_table(("rank", "phase"), [(0, "serve"), (10, "park")])
    assert table == "rank  phase\n   0  serve\n  10  park"
    assert format_table(("a", "bc"), []) == "a  bc"


def test_ranks_are_shown_with_what_they_cannot_do() -> None:
    ranks = [
        {"rank": 0, "phase": "SERVE", "available": True, "degraded": True},
        {"rank": 1, "phase": "SERVE", "available": False, "degraded": False},
        {"rank": 2, "phase": "never heard", "available": False},
        {"rank": 3, "phase": "SERVE", "available": True, "degraded": False, "pages_free": 7},
        {"rank": 4, "phase": "SERVE", "available": False, "exited": True, "pages_free": 7},
        {"rank": 5, "phase": "SERVE", "available": False, "exited": False, "connected": False},
    ]
    shown = operate._ranks_table(ranks).splitlines()[-6:]
    assert [line.split()[-2] for line in shown] == ["-", "-", "-", "7", "-", "-"]
    phases = ["SERVE, only dp", "SERVE, not available", "never heard, not available", "SERVE  "]
    phases += ["starting again  ", "lost  "]
    for line, phase in zip(shown, phases, strict=True):
        assert phase in line


def test_options_set_the_log() -> None:
    config = build("--log-level", "warning", "--log-format", "console")
    assert (config.log.level, config.log.format) == ("warning", "console")
    assert (LOG_LEVELS, LOG_FORMATS) == (LEVELS, FORMATS), "as the processes accept them"


def test_the_terminal_shows_requests_only_on_demand() -> None:
    request, other = '{"event":"request","status":200}', '{"event": "gateway_ready"}'
    shown = {
        (processes, requests): [
            TerminalFilter(processes=processes, requests=requests).has(each)
            for each in (request, other)
        ]
        for processes in (False, True)
        for requests in (False, True)
    }
    assert shown == {
        (False, False): [False, False],
        (False, True): [True, False],
        (True, False): [False, True],
        (True, True): [True, True],
    }
