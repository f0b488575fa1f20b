"""`aileron plan`: its table and its JSON, its advice, and one sentence for each mistake."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest

from coordinator.cli import main, plan
from tests.harness.coordinator.published_models import CONFIGS, fill_cache

LIMIT_S = 2.0
QWEN = "Qwen/Qwen3-32B"
LLAMA = "meta-llama/Llama-3.1-70B-Instruct"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(plan, "gpu_names", lambda: ())
    monkeypatch.setattr(plan, "gpu_memory_bytes", lambda: 0)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) != 0
    found = capsys.readouterr().err.strip()
    assert "\n" not in found
    return found


def test_without_torch_and_within_two_seconds() -> None:
    """Of processor time: other work on this machine does not count."""
    code = (
        "import sys; from coordinator.cli import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules); sys.exit(status)"
    )
    words = ["plan", QWEN, "--gpus", "4", "--memory", "80"]
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *words], env=os.environ, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took_s < LIMIT_S


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", QWEN, "--gpus", "2", "--memory", "80"]) == 0
    shown = capsys.readouterr().out
    for text in ("32.76 billion", "256 KiB of KV", "0.92 is used", "up to 40,960 tokens"):
        assert text in shown
    for text in ("all weights", "--weight-parts 2 --borrow none", "tp2, sp2, shift2"):
        assert text in shown


def test_kv_of_fp8_takes_half_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = [QWEN, "--gpus", "2", "--memory", "80"]
    tokens = []
    for given in ([], ["--kv-cache-dtype", "fp8"]):
        assert main(["plan", *words, *given]) == 0
        shown = capsys.readouterr().out
        assert ("128 KiB of KV" if given else "256 KiB of KV") in shown
        row = next(line for line in shown.splitlines() if line.startswith("all weights"))
        tokens.append(int(row.split()[-2].replace(",", "")))
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["4"], ""),
        (["3"], "No group is wider than 1: widths are powers of two that divide 3.\n"),
        (["6"], "No group is wider than 2: widths are powers of two that divide 6.\n"),
    ],
)
def test_the_table_says_why_groups_are_narrow(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", QWEN, "--memory", "140", "--gpus", *words]) == 0
    shown = capsys.readouterr().out
    assert sentence in shown
    assert bool(sentence) == ("No group is wider" in shown)


def test_the_table_says_which_width_the_heads_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 128}
    stored = {**CONFIGS[QWEN], **heads}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert main(["plan", str(tmp_path), "--memory", "140", "--gpus", "4"]) == 0
    assert "No group is wider than 2: a wider one does not divide" in capsys.readouterr().out


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, QWEN, "--gpus", "2", "--memory", "80")
    assert found["kv_bytes_per_token"] == 2 * 64 * 8 * 128 * 2
    assert found["max_model_len"] == 40_960
    assert [(each["weight_parts"], each["borrow"]) for each in found["cells"]] == [
        (1, None),
        (2, "ffn"),
        (2, "all"),
        (2, "none"),
    ]
    for cell in found["cells"]:
        parts = ("weights", "ring", "whole_layers", "activations", "graphs", "communicators")
        named = sum(cell[f"{name}_bytes"] for name in (*parts, "workspace", "kv"))
        assert named == cell["room_bytes"]
        for layout in cell["layouts"]:
            assert layout["cell_tokens"] == sum(layout["group_tokens"])


def test_host_memory_holds_tokens_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    base = (QWEN, "--gpus", "2", "--memory", "80")
    assert planned(capsys, *base)["host_kv_tokens"] is None
    tokens = planned(capsys, *base, "--host-kv", "64")["host_kv_tokens"]
    assert tokens == pytest.approx(64 * 2**30 / (256 * 1024), rel=0.001)
    assert main(["plan", *base, "--host-kv", "64"]) == 0
    assert f"{tokens:,} tokens of KV for all ranks." in capsys.readouterr().out
    for much in ("inf", "nan", "-1"):
        assert "use at most 65536 (GiB)" in refusal(capsys, *base, f"--host-kv={much}")
    assert "give at least" in refusal(capsys, *base, "--host-kv", "0.001")


def test_options_change_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    base = (QWEN, "--gpus", "2", "--memory", "80", "--weight-parts", "1")
    (usual,) = planned(capsys, *base)["cells"]
    for words, grows in (
        (("--gpu-memory-utilization", "0.95"), True),
        (("--max-num-seqs", "256"), True),
        (("--quantization", "fp8_per_tensor"), True),
        (("--max-num-batched-tokens", "16k"), False),
        (("--", "--enforce-eager"), True),
    ):
        if words[0] == "--":
            main(["plan", *base, "--json", *words])
            found = json.loads(capsys.readouterr().out)
        else:
            found = planned(capsys, *base, *words)
        (changed,) = found["cells"]
        assert (changed["kv_bytes"] > usual["kv_bytes"]) == grows, words
    (short,) = planned(capsys, *base, "--max-model-len", "8k")["cells"]
    assert {each["longest_request"] for each in short["layouts"]} == {8_000}
    whole = planned(capsys, *base[:-1], "2", "--borrow", "ffn", "--whole-layers", "16")
    assert whole["cells"][0]["whole_layers_bytes"] == 16 * 3 * 5_120 * 25_600


def test_a_quantized_checkpoint_counts_as_its_config_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {**CONFIGS[LLAMA], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, str(tmp_path), "--gpus", "2", "--memory", "140.4")
    assert found["cells"][0]["weights_bytes"] == pytest.approx(72_666_860_032, rel=0.001)


def test_what_does_not_fit_gets_advice(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, LLAMA, "--gpus", "2", "--memory", "80")
    assert not any(each["fits"] for each in found["cells"])
    halves = found["cells"][3]
    assert "A request of 131,072 tokens needs" in halves["reason"] or halves["kv_bytes"] == 0
    assert main(["plan", LLAMA, "--gpus", "2", "--memory", "80"]) == 1
    shown = capsys.readouterr().out
    assert "such GPUs" in shown
    four = planned(capsys, LLAMA, "--gpus", "4", "--memory", "80")
    assert not four["cells"][0]["fits"]
    assert four["cells"][0]["advice"] == "use --weight-parts 4 --borrow ffn."


def test_advice_is_right_when_it_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    base = (QWEN, "--gpus", "4", "--memory", "40")
    found = planned(capsys, *base)
    tight = next(each for each in found["cells"] if "--max-model-len" in each["advice"])
    length = tight["advice"].split("--max-model-len ")[1].split(",")[0]
    again = planned(capsys, *base, "--max-model-len", length)
    same = next(
        each
        for each in again["cells"]
        if (each["weight_parts"], each["borrow"]) == (tight["weight_parts"], tight["borrow"])
    )
    assert same["fits"]


def test_what_cannot_be_served_so_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Packed weights are served where no rank views them."""
    config = {**CONFIGS[QWEN], "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, str(tmp_path), "--gpus", "2", "--memory", "80")
    fits = {
        (each["weight_parts"], each["borrow"], len(each["widths"])): each["fits"]
        for each in found["cells"]
    }
    assert fits == {
        (1, None, 2): False,
        (1, None, 1): True,
        (2, "ffn", 2): False,
        (2, "all", 2): True,
        (2, "none", 2): True,
    }
    groups, alone = found["cells"][:2]
    assert "quantization 'awq'" in groups["reason"]
    assert groups["advice"] == "use --widths 1."
    assert [each["layout"] for each in alone["layouts"]] == ["dp2"]
    assert main(["plan", str(tmp_path), "--gpus", "2", "--memory", "80"]) == 0
    assert "all weights, --widths 1" in capsys.readouterr().out


def test_kv_memory_that_is_too_large_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "2", "--memory", "80", "--max-model-len", "8k", "--weight-parts", "1")
    found = planned(capsys, QWEN, *words, "--kv-cache-memory-bytes", "99999999999999")
    cell = found["cells"][0]
    assert "--kv-cache-memory-bytes exceeds" in cell["reason"]
    advised = re.search(r"use at most --kv-cache-memory-bytes (\d+)", cell["advice"])
    assert advised is not None
    assert "smaller model" not in cell["advice"]
    again = planned(capsys, QWEN, *words, "--kv-cache-memory-bytes", advised[1])
    assert again["cells"][0]["fits"]


def test_what_no_device_changes_gets_no_advice_about_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {**CONFIGS[QWEN], "layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--gpus", "2", "--memory", "80"]) == 1
    printed = capsys.readouterr().out
    assert "serve a model whose layers all have attention." in printed
    assert "Remedy" not in printed


def test_more_gpus_are_advised_where_the_model_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Packed weights that one GPU cannot hold: only parts that nobody views serve them."""
    config = {**CONFIGS[LLAMA], "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, str(tmp_path), "--gpus", "1", "--memory", "40", "--max-model-len", "8k")
    advice = found["cells"][0]["advice"]
    assert advice == "use 2 such GPUs with --weight-parts 2 --borrow all."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("Nobody/Nothing", "--memory", "80"), "is not in the cache"),
        (("/no/folder", "--memory", "80"), "is no folder: check the path."),
        ((QWEN,), None),
        ((QWEN, "--gpus", "2"), "add --memory GIB, such as --memory 80."),
        ((QWEN, "--gpus", "0", "--memory", "80"), "--gpus 0: use 1 to 64."),
        ((QWEN, "--ranks", "0", "--memory", "80"), "--ranks 0: use 1 to 64."),
        ((QWEN, "--ranks", "2", "--gpus", "4", "--memory", "80"), "--gpus and --ranks differ"),
        ((QWEN, "--gpus", "2", "--memory", "-1"), "use the GiB of one GPU"),
        ((QWEN, "--gpus", "2", "--memory", "80", "--weight-parts", "3"), "use a power of two"),
        ((QWEN, "--gpus", "2", "--memory", "80", "--mixed", "sp2tp2"), "are 1, 2 wide"),
        ((QWEN, "--gpus", "2", "--memory", "80", "--mixed", "tp2"), "is not a mixed group"),
        ((QWEN, "--memory", "80", "--dtype", "int9"), "--dtype"),
        ((QWEN, "--memory", "80", "--max-model-len", "long"), "--max-model-len"),
        ((QWEN, "--memory", "80", "--gpu-memory-utilization", "3"), "--gpu-memory-utilization"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str | None
) -> None:
    if sentence is None:
        # Without GPUs the machine itself is planned, as `aileron up` serves on it.
        assert main(["plan", *words]) in (0, 1)
        assert "rank on the CPU" in capsys.readouterr().out
        assert main(["plan", "--model", *words, "--ranks", "2"]) in (0, 1)
        assert "2 ranks on the CPU" in capsys.readouterr().out
    else:
        assert sentence in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"vision_config": {}, "text_config": {}}, "multimodal models cannot be served"),
        ({"architectures": ["LlamaForCausalLM"]}, "does not say how large the model is"),
    ],
)
def test_models_without_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sentence in refusal(capsys, str(tmp_path), "--gpus", "2", "--memory", "80")
