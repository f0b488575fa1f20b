"""`aileron config check`, `show` and `schema`, and references to secrets."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli import main
from coordinator.cli.arguments import parse_arguments
from coordinator.cli.launch import Machine, build_config
from coordinator.protocol.config import Config, ConfigError, check_config, dump_config, load_config
from coordinator.protocol.policy_config import SloTarget
from coordinator.protocol.secret_text import SecretText, resolve

PYDANTIC = ("Value error", "Extra inputs", "Input should", "Field required", "validation", "unable")
FAULTS = """\
# A cell with a fault on nearly every line.
model:
  path: x
  served_nam: y
cell:
  ranks: eight
  widths: [1, two]
  whole_layers: some
  layout: tp8
gateway:
  host: 0.0.0.0
  prot: 1
  port: 70000
  objectives: {chat: fast}
  requests_max: -1
coordinator:
  lease_ms: 20000
fleet:
  cells: [a, 'b:1']
  redis: http://x
slo:
  sizes:
  - billions_min: 3
    interactve: {ttft_ms: 3}
rate_limit_storage: memory://
logg: 1
policy: [fixed]
gateway:
  port: 8000
"""
URL = "redis://:geheim@redis.example:6379/2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cell.yaml"


def faults_of(file: Path, text: str, capsys: pytest.CaptureFixture[str]) -> dict[int, list[str]]:
    """Return the sentences by line, and check that all ways to print them agree."""
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert not [word for word in PYDANTIC if word in shown.err]
    assert main(["config", "check", "--json", str(file)]) == 2
    found: dict[int, list[str]] = {}
    lines = shown.err.splitlines()
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        place = f"{file}:{fault['line']}" if fault["line"] else f"{file}"
        assert line == f"{place}: {fault['message']}"
        assert fault["message"].endswith((".", "?"))
        found.setdefault(fault["line"], []).append(fault["message"])
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert all(each["message"] in str(refused.value) for each in faults)
    assert main(["config", "show", str(file)]) == 2
    assert capsys.readouterr().err == shown.err
    return found


def test_every_fault_is_found_in_one_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FAULTS.rpartition("gateway:")[0]
    found = faults_of(file, text, capsys)
    wanted = {
        4: ["unknown setting model.served_nam; did you mean model.served_name?"],
        6: ["cell.ranks must be a valid integer."],
        7: ["cell.widths.1 must be a valid integer."],
        8: ["cell.whole_layers must be 'auto', or a valid integer, or a list."],
        12: ["unknown setting gateway.prot; did you mean gateway.port?"],
        13: ["gateway.port must be less than or equal to 65535."],
        14: ["gateway.objectives.chat must be 'interactive', 'standard' or 'batch'."],
        15: ["gateway.requests_max must be greater than or equal to 1."],
        20: ["fleet.redis must be a redis:// URL, or empty."],
        24: ["unknown setting slo.sizes.0.interactve; did you mean slo.sizes.0.interactive?"],
        25: ["unknown setting rate_limit_storage; did you mean gateway.rate_limit_storage?"],
        26: ["unknown setting logg; did you mean log?"],
        27: [
            "policy must have settings below it: write `policy:` and below it, indented, lines "
            "such as `name: …`."
        ],
    }
    assert {line: found[line] for line in wanted} == wanted
    assert sorted(set(found) - set(wanted)) == [11, 17, 19], "what several settings contradict"
    assert found[11][0].startswith("gateway.host 0.0.0.0 can be reached from other machines")
    assert found[17][0].startswith("coordinator.lost_after_ms must be at least")
    assert [each.partition(" ")[0] for each in found[19]] == ["fleet.cells"] * 2


def test_no_contradiction_is_reported_that_may_follow_from_another_fault(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model: {path: x}\ncell: {rank: 8, widths: [1, 8], layout: tp8}\n"
    assert faults_of(file, text, capsys) == {
        2: ["unknown setting cell.rank; did you mean cell.ranks?"]
    }


def test_all_relations_are_checked_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "model: {path: x}\ncell:\n  layout: tp4\ncoordinator:\n  lease_ms: 20000\n"
        "policy:\n  batch: {width_min: 8}\ngateway:\n  processes: 2\n"
        "  token_listen: tcp://127.0.0.1:9\n  keys_file: k\n"
    )
    assert list(faults_of(file, text, capsys)) == [3, 5, 7, 9, 10]


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("model: {path: x\n", 2, "not valid YAML"),
        ("model: {path: x}\ngateway:\n\tport: 1\n", 3, "not valid YAML"),
        ("", 0, "has no settings"),
        ("- a\n", 0, "has no settings"),
        ("gateway: {port: 1}\n", 0, "model is missing."),
        ("model:\n  served_name: x\n", 1, "model.path is missing."),
        ("model: {path: x}\nmodel: {path: y}\n", 2, "stands here again after line 1"),
        ("model: {path: x}\ngateway: 7\n", 2, "lines such as `host: …`."),
        ("model: {path: x}\ncell: {widths: 7}\n", 2, "cell.widths must be a list."),
        ("model: {path: x}\ncell: {exchange_parts: []}\n", 2, "must have at least 1 item"),
    ],
)
def test_a_fault_has_its_line(
    file: Path, text: str, line: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = faults_of(file, text, capsys)
    assert list(found) == [line]
    assert sentence in found[line][0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[--max-modl-len, '5']", "no option --max-modl-len; did you mean --max-model-len?"),
        ("[--seed, a]", "--seed takes a whole number, not 'a'."),
        ("[--uds, x]", "--uds is not offered"),
        ("[--gpu-memory-utilization, '5']", "use a number above 0"),
        ("[--max-model-len, 4096]", "engine_args.1 must be text: put it in quotes."),
    ],
)
def test_check_finds_what_vllm_refuses(
    file: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"model:\n  path: x\n  engine_args: {text}\n")
    assert main(["config", "check", str(file)]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"{file}:3: model.engine_args")
    assert sentence in found


def test_a_section_of_a_tier_keeps_the_defaults_that_it_does_not_name() -> None:
    whole = check_config({"model": {"path": "x"}})
    sizes = [{"billions_min": 40, "interactive": {"tpot_ms": 40}}]
    given = {
        "model": {"path": "x"},
        "slo": {"interactive": {"ttft_ms": 400}, "standard": {"tpot_ms": None}, "sizes": sizes},
        "policy": {"interactive": {"width_min": 2}, "batch": {"width_min": 1}},
        "coordinator": {"tiers": {"interactive": {"wait_ms": 5}}},
    }
    found = check_config(given)
    assert found.slo.interactive == SloTarget(ttft_ms=400, tpot_ms=30)
    assert found.slo.standard == SloTarget(ttft_ms=2_000), "null is no objective"
    assert found.slo.of_size(50).interactive == SloTarget(ttft_ms=400, tpot_ms=40)
    assert found.policy.interactive.weight == whole.policy.interactive.weight == 2
    assert found.policy.batch == whole.policy.batch
    tiers = found.coordinator.tiers
    assert tiers.interactive.wait_ms == 5
    assert tiers.interactive.queue_tasks_max == whole.coordinator.tiers.interactive.queue_tasks_max
    assert tiers.batch == whole.coordinator.tiers.batch
    assert check_config(yaml.safe_load(dump_config(found))) == found


def test_a_right_file_is_right(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("model: &m {path: x}\ngateway:\n  port: 1234\n")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: no faults.\n"
    assert main(["config", "check", str(file.with_name("none"))]) == 2
    assert capsys.readouterr().err.startswith("aileron: cannot read ")


def test_show_prints_all_that_processes_use(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("model: {path: x}\ngateway:\n  port: 1234\n")
    assert main(["config", "show", str(file)]) == 0
    text = capsys.readouterr().out
    assert check_config(yaml.safe_load(text)) == load_config(file)
    assert set(yaml.safe_load(text)) == set(Config.model_fields)
    assert main(["config", "show", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(text)


def test_show_prints_no_secret(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_REDIS", URL)
    file.write_text(
        "model:\n  path: x\n  engine_args: [--hf-token, geheim, --api-key=geheim, --seed, '3']\n"
        f"gateway: {{rate_limit_storage: '{URL}'}}\n"
        "batches: {storage: 'redis://geheim-user:geheim@h:1/2?password=geheim'}\n"
        "fleet: {redis: '${OUR_REDIS}'}\n"
        "tracing: {endpoint: 'https://h/v1?api_key=geheim&x=1'}\n"
        "run_dir: 'odd://a:ge/heim@geheim@h/x'\n"
    )
    assert main(["config", "show", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.replace("geheim-user", "").count("geheim") == 0
    shown = yaml.safe_load(text)
    assert shown["gateway"]["rate_limit_storage"] == "redis://:***@redis.example:6379/2"
    assert shown["batches"]["storage"] == "redis://geheim-user:***@h:1/2?password=***"
    assert shown["fleet"]["redis"] == "${OUR_REDIS}"
    assert shown["run_dir"] == "odd://a:***@h/x"
    assert shown["tracing"]["endpoint"] == "https://h/v1?api_key=***&x=1"
    assert shown["model"]["engine_args"] == ["--hf-token", "***", "--api-key=***", "--seed", "3"]


def test_schema_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Config.model_fields)
    gateway = schema["$defs"]["GatewayConfig"]["properties"]
    assert gateway["keys_file"]["description"].startswith("YAML file with the hashes")
    assert main(["config", "schema", "aileron.yaml"]) == 0, "nothing is read"


def test_references_are_resolved_and_stay_references_in_files(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_PASSWORD", "geheim")
    (file.parent / "url").write_text(f"{URL}\n")
    file.write_text(
        "model: {path: x}\n"
        "gateway: {rate_limit_storage: 'redis://:${OUR_PASSWORD}@redis.example:6379/2'}\n"
        f"batches: {{storage_file: {file.parent}/url}}\nfleet: {{redis_file: {file.parent}/url}}\n"
    )
    config = load_config(file)
    for each in (config.gateway.rate_limit_storage, config.batches.storage, config.fleet.redis):
        assert each == URL
    text = dump_config(config)
    assert "geheim" not in text
    file.write_text(text)
    assert load_config(file) == config
    # As `aileron up --config` does it: with options over what the file says.
    machine = Machine(0, (1, 2, 3, 4), str(file.parent), str(file.parent))
    options = parse_arguments(["up", "--config", str(file), "--port", "9000"])
    made = build_config(options, machine)
    assert made.gateway.rate_limit_storage == made.fleet.redis == URL
    assert "geheim" not in dump_config(made)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gateway: {rate_limit_storage: '${NOT_SET_HERE}'}", "and NOT_SET_HERE is not: set it"),
        ("fleet: {redis: 'redis://${not closed'}", "must name variables as ${NAME}"),
        ("fleet: {redis_file: /none}", "fleet.redis_file: cannot read /none: No such file"),
        ("fleet: {redis_file: FOLDER/empty}", "is empty: write the value into it."),
        ("fleet: {redis_file: FOLDER/url, redis: 'redis://a'}", "exclude each other"),
        ("fleet: {redis_file: FOLDER/wrong}", "fleet.redis must be a redis:// URL"),
        ("gateway: {rate_limit_storage_file: FOLDER/wrong}", "must be memory:// or a redis:// URL"),
        ("batches: {storage_file: FOLDER/wrong}", "must be sqlite:// or a redis:// URL"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(
    file: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("empty", " \n"), ("url", URL), ("wrong", "geheim")):
        (file.parent / name).write_text(content)
    text = "model: {path: x}\n" + text.replace("FOLDER", str(file.parent))
    [(line, sentences)] = faults_of(file, text, capsys).items()
    assert line == 2
    assert sentence in sentences[0]
    assert "geheim" not in sentences[0]


def test_a_resolved_value_survives_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_REDIS", URL)
    value = resolve("${OUR_REDIS}")
    for each in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert isinstance(each, SecretText)
        assert (each, each.reference) == (URL, "${OUR_REDIS}")
    assert resolve("$5 and $") == "$5 and $"
