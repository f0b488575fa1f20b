"""What a model lacks is known before any process starts: somebody who has it, memory, positions."""

import re
import shutil
import ssl
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.model_check import Memory, check_model, require_reachable
from coordinator.protocol.model_files import ask_nobody
from tests.harness.coordinator.model_folders import hub_says
from worker.demo import MODEL_DIR

LIMIT_S = 10.0
"""On a busy machine too; a command that asks again and again takes forty seconds and more."""


def check(model: Path | str, *engine_args: str, memory: Memory | None = None, **cell: Any) -> None:
    data = {"model": {"path": str(model), "engine_args": engine_args}, "cell": cell}
    check_model(check_config(data), {}, memory=memory, fetch=ask_nobody)


def cached(folder: Path) -> Path:
    """Make a cache that holds the demo model as org/name; returns the model's folder."""
    repository = folder / "hub" / "models--org--name"
    shutil.copytree(MODEL_DIR, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return repository / "snapshots" / "abc"


def reach(home: Path, *engine_args: str, fetch: Any = ask_nobody, model: str = "org/name") -> bool:
    """Return whether all of a model is in the cache, and nobody else answers."""
    environment = {"HF_HOME": str(home)}
    config = check_config({"model": {"path": model, "engine_args": engine_args}})
    files = check_model(config, environment, fetch=fetch)
    return require_reachable(config, files, environment, fetch)


def test_a_model_that_nobody_has_is_refused_before_processes_start(tmp_path: Path) -> None:
    unreachable = "config.json of org/name cannot be had: Hugging Face does not answer"
    with pytest.raises(ConfigError, match=unreachable):
        reach(tmp_path)
    with pytest.raises(ConfigError, match=r"--tokenizer: the config\.json of a/b cannot be had"):
        reach(tmp_path, "--tokenizer", "a/b", model=str(MODEL_DIR))
    # Somebody answers, so vLLM decides.
    reach(tmp_path, fetch=hub_says(404, "EntryNotFound"))
    reach(tmp_path, fetch=hub_says(503, ""))


def test_a_certificate_that_only_vllm_may_know_is_no_silence(tmp_path: Path) -> None:
    def fetch(_url: str, _headers: Mapping[str, str]) -> bytes:
        raise urllib.error.URLError(ssl.SSLCertVerificationError("unknown authority"))

    reach(tmp_path, fetch=fetch)


def test_a_cached_model_needs_nobody_unless_its_weights_are_missing(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert reach(tmp_path)
    assert reach(tmp_path, "--tokenizer", "org/name", model=str(MODEL_DIR))
    assert not reach(tmp_path, model=str(MODEL_DIR))
    assert not reach(tmp_path, fetch=hub_says(503, ""))
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no weights.*Hugging Face does not answer now"):
        reach(tmp_path)
    reach(tmp_path, fetch=hub_says(503, ""))


@pytest.mark.parametrize("command", ["up --model", "serve", "doctor --model", "plan"])
def test_every_command_says_at_once_that_a_model_cannot_be_had(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # Nothing listens there.
    started = time.monotonic()
    assert main([*command.split(), "org/name"]) != 0
    assert time.monotonic() - started < LIMIT_S
    said = capsys.readouterr()
    assert "the config.json of org/name cannot be had" in said.out + said.err


def test_kv_memory_that_does_not_fit_names_a_value_that_does() -> None:
    machine = Memory(24 * 2**30, "this machine", 16 * 2**30)
    with pytest.raises(ConfigError, match=r"room for 16\.0 GiB: use at most") as no:
        check(MODEL_DIR, "--kv-cache-memory-bytes", "9G", memory=machine, ranks=2)
    advised = re.search(r"at most --kv-cache-memory-bytes (\d+)", str(no.value))
    assert advised is not None
    check(MODEL_DIR, "--kv-cache-memory-bytes", advised[1], memory=machine, ranks=2)
    assert int(advised[1]) > 7 * 2**30
    check(MODEL_DIR, "--kv-cache-memory-bytes", "9G", memory=machine, ranks=1, widths=(1,),
          layout="dp1")  # fmt: skip
    gpu = Memory(80 * 2**30, "its GPU")
    with pytest.raises(ConfigError, match=r"its GPU has room for 80\.0 GiB"):
        check(MODEL_DIR, "--kv-cache-memory-bytes", "81G", memory=gpu, device="cuda")
    check(MODEL_DIR, "--kv-cache-memory-bytes", "70G", memory=gpu, device="cuda")
    with pytest.raises(ConfigError, match="-5: use 0 or more"):
        check(MODEL_DIR, "--kv-cache-memory-bytes", "-5")


def test_requests_that_are_longer_than_the_model_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = MODEL_DIR
    sentence = "--max-model-len 10000000 is more than the 2048 tokens"
    with pytest.raises(ConfigError, match=f"{sentence}.*use at most --max-model-len 2048"):
        check(model, "--max-model-len", "10000000")
    assert main(["plan", str(model), "--max-model-len", "10000000"]) == 2
    assert sentence in capsys.readouterr().err
    check(model, "--max-model-len", "2048")
    check(model, "--max-model-len", "4k", "--hf-overrides", '{"max_position_embeddings": 4096}')
    with pytest.raises(ConfigError, match="--max-model-len 0: use 1 or more"):
        check(model, "--max-model-len", "0")
    config = check_config(
        {"model": {"path": str(model), "engine_args": ("--max-model-len", "10M")}}
    )
    check_model(config, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, fetch=ask_nobody)
