"""Which NCCL and which sampler ranks on CUDA get, and what is refused with an older one."""

import re
from pathlib import Path

import pytest

from coordinator.cli import doctor, main
from coordinator.protocol.config import Config, ConfigError, check_config
from coordinator.protocol.nccl import SHARING, can_share, check_nccl
from worker.__main__ import VLLM_ENVIRONMENT

LOCK = Path(__file__).resolve().parents[3] / "requirements" / "gpu.lock"


def sharing(ranks_per_device: int, device: str = "cuda") -> Config:
    cell = {"device": device, "ranks_per_device": ranks_per_device}
    return check_config({"model": {"path": "x"}, "cell": cell})


def test_the_lock_has_an_nccl_with_which_ranks_share_a_device() -> None:
    [found] = re.findall(r"^nvidia-nccl-cu13==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert can_share(found)


@pytest.mark.parametrize("found", ["2.29.7", "2.28.9", "1.99"])
def test_an_older_nccl_refuses_shared_devices(found: str) -> None:
    with pytest.raises(ConfigError, match=f"NCCL {found} is installed"):
        check_nccl(sharing(2), found, {})
    check_nccl(sharing(1), found, {})
    check_nccl(sharing(2, "cpu"), found, {})
    check_nccl(sharing(2), found, {"LD_PRELOAD": "/opt/libnccl.so.2"})


def test_a_newer_one_or_an_unknown_one_does_not() -> None:
    for found in ("2.30.7", "2.31", "3.0.1", None):
        check_nccl(sharing(2), found, {})
    assert SHARING == (2, 30)


def test_flashinfer_s_sampler_is_off_unless_the_user_wants_it() -> None:
    from vllm import envs

    assert "VLLM_USE_FLASHINFER_SAMPLER" in envs.environment_variables
    assert VLLM_ENVIRONMENT["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_doctor_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_engine_status", lambda _: 0)
    monkeypatch.setattr(doctor, "nccl_version", lambda: "2.30.7")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ok       nccl      2.30.7" in said
    assert "ok       sampler   vLLM's own, which needs no compiler" in said
    monkeypatch.setattr(doctor, "nccl_version", lambda: "2.29.7")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    main(["doctor"])
    said = capsys.readouterr().out
    assert "note     nccl      2.29.7" in said
    assert "needs nvcc, ninja, g++: install them" in said
