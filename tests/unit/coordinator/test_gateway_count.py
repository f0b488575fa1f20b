"""How many gateway processes a cell has where nobody says so."""

from pathlib import Path

import pytest

from coordinator.cli.arguments import parse_arguments
from coordinator.cli.launch import Machine, build_config


def gateways(*arguments: str, gpus: int, cores: int) -> int:
    """How many gateway processes serve by default."""
    ports = (20_001, 20_002, 20_003, 20_004)
    machine = Machine(gpus, ports, "/tmp/run", "/tmp/state", cores=cores)
    return build_config(parse_arguments(["up", *arguments]), machine).gateway.processes


def test_gpus_have_several_gateways_where_cores_suffice() -> None:
    assert gateways(gpus=2, cores=32) == 4
    assert gateways(gpus=2, cores=8) == 2
    assert gateways(gpus=2, cores=3) == 1
    assert gateways("--ranks", "1", gpus=2, cores=32) == 2
    assert gateways("--device", "cpu", gpus=2, cores=32) == 1
    assert gateways("--gateways", "1", gpus=2, cores=32) == 1
    assert gateways("--keys", "keys.yaml", gpus=2, cores=32) == 1, "each would count for itself"


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("{processes: 1}", 1),
        ("{port: 9}", 4),
        ("{token_listen: 'tcp://127.0.0.1:77'}", 1),
        ("{metrics_listen: '127.0.0.1:78'}", 1),
        ("{keys_file: k.yaml, rate_limit_storage: 'redis://127.0.0.1'}", 4),
    ],
)
def test_a_file_has_the_word_on_gateways(tmp_path: Path, line: str, number: int) -> None:
    file = tmp_path / "cell.yaml"
    file.write_text(
        "model: {path: a/b}\n"
        "cell: {ranks: 2, widths: [1, 2], layout: dp2, device: cuda}\n"
        f"gateway: {line}\n"
    )
    assert gateways("--config", str(file), gpus=2, cores=32) == number
