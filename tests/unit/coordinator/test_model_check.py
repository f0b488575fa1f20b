"""Mistakes that one can see at once are refused at once, in one sentence, without vLLM."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.cli.hardware import host_memory_bytes, read_gpus
from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.model_check import Memory, check_model
from coordinator.protocol.model_files import ask_nobody, find_model, weight_bytes, weight_paths
from tests.harness.coordinator.model_folders import change, check, hub_says
from worker.demo import MODEL_DIR

LIMIT_S = 2.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def test_a_whole_model_is_served(model: Path) -> None:
    check(model)
    check(model, "--dtype", "float32", device="cuda", memory=Memory(80 * 2**30, "a GPU"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/no/where", "/no/where is no folder"),
        ("./model", "./model is no folder"),
        ("a/b/c", "a/b/c is no folder"),
        ("a b/c", "neither a folder nor a model's id"),
        ("org/..", "neither a folder nor a model's id"),
    ],
)
def test_a_wrong_path_or_id(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(name)


def test_hugging_face_is_asked_for_an_id_that_is_not_in_the_cache(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://hub", "HF_TOKEN": "t"}
    asked: list[tuple[str, Mapping[str, str]]] = []

    def fetch(url: str, headers: Mapping[str, str]) -> bytes:
        asked.append((url, headers))
        return b'{"architectures": ["AnyForCausalLM"], "kv_lora_rank": 512}'

    config = check_config({"model": {"path": "org/name"}})
    with pytest.raises(ConfigError, match="latent attention"):
        check_model(config, environment, fetch=fetch)
    assert asked == [
        ("http://hub/org/name/resolve/main/config.json", {"Authorization": "Bearer t"})
    ]
    with pytest.raises(ConfigError, match="http://hub has no such model"):
        check_model(config, environment, fetch=hub_says(401, "RepoNotFound"))
    with pytest.raises(ConfigError, match="only to users who asked"):
        check_model(config, environment, fetch=hub_says(403, "GatedRepo"))
    # Without an answer that will stay as it is, vLLM decides.
    check_model(config, environment, fetch=hub_says(404, "EntryNotFound"))
    check_model(config, environment, fetch=hub_says(503, ""))
    check_model(config, environment, fetch=ask_nobody)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        check_model(config, {**environment, "HF_HUB_OFFLINE": "1"}, fetch=fetch)


def test_a_model_in_the_cache_is_read_there(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(MODEL_DIR, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    files = find_model("org/name", {"HF_HOME": str(tmp_path)}, ask_nobody)
    assert files.folder == snapshot
    (snapshot / "model.safetensors").unlink()
    config = check_config({"model": {"path": "org/name"}})
    check_model(config, {"HF_HOME": str(tmp_path)}, fetch=ask_nobody)  # vLLM gets the rest.
    with pytest.raises(ConfigError, match="has no weights"):
        check_model(config, {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, fetch=ask_nobody)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer*", "has no tokenizer"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_missing_file(model: Path, name: str, sentence: str) -> None:
    for path in model.glob(name):
        path.unlink()
    with pytest.raises(ConfigError, match=sentence):
        check(model)
    if "weights" in sentence:
        check(model, weights=False)
        check(model, "--load-format", "dummy")


def test_a_family_is_refused_before_its_files_are_missing(model: Path) -> None:
    for path in [*model.glob("tokenizer*"), model / "model.safetensors"]:
        path.unlink()
    change(model, architectures=["BertModel"])
    with pytest.raises(ConfigError, match="pooling models cannot be served"):
        check(model)


def test_gguf_is_refused_as_a_file_and_in_a_folder(model: Path) -> None:
    gguf = (model / "model.safetensors").rename(model / "model.Q4_K_M.gguf")
    for name in (model, gguf):
        with pytest.raises(ConfigError, match="vLLM does not load GGUF: use the model's safeten"):
            check(name)


def test_weights_that_are_not_whole(model: Path) -> None:
    file = model / "model.safetensors"
    with file.open("r+b") as weights:
        weights.truncate(file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is cut short, 9480647 of 9480648 bytes"):
        check(model)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        check(model)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="no safetensors file"):
        check(model)
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"lacks 2 of the 2 files .* such as model-1.safetensors"):
        check(model)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["X"], "vision_config": {}}, "multimodal models cannot be served"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"architectures": ["X"], "kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "recurrent state"),
        ({"layers_block_type": ["recurrent", "attention"]}, "recurrent state"),
        ({"mamba_d_state": 16}, "recurrent state"),
        ({"state_size": 16}, "recurrent state"),
        ({"attention_chunk_size": 64, "max_position_embeddings": 512}, "attention in chunks"),
        ({"attention_chunk_size": 64, "max_position_embeddings": None}, "attention in chunks"),
        ({"alibi": True}, "ALiBi"),
        ({"attn_config": {"alibi": True}}, "ALiBi"),
        ({"position_embedding": "ALIBI"}, "ALiBi"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, "does not divide the model's 9"),
        ({"intermediate_size": 705}, "intermediate size 705"),
        ({"num_local_experts": 7}, "7 experts"),
    ],
)
def test_a_model_that_ranks_refuse(model: Path, fields: dict[str, Any], sentence: str) -> None:
    change(model, **fields)
    with pytest.raises(ConfigError, match=sentence) as refused:
        check(model, device="cuda")
    assert str(refused.value).count(str(model)) == 1


READ = (
    *("architectures", "is_encoder_decoder", "kv_lora_rank", "sliding_window"),
    *("layers_block_type", "layer_types", "quantization_config", "compression_config", "dtype"),
    *("mamba_d_state", "attention_chunk_size", "max_position_embeddings", "alibi", "attn_config"),
    *("position_embedding", "position_embedding_type"),
    *("torch_dtype", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("intermediate_size", "num_experts", "num_local_experts"),
)
"""The members of config.json that the check reads."""
READ_OF_QUANTIZATION = (
    *("quant_method", "kv_cache_scheme", "weight_block_size", "config_groups", "quant_algo"),
)
ANY_JSON: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    0.5,
    float("nan"),
    "x",
    "",
    [],
    [None],
    [[]],
    {},
    {"x": None},
)


@pytest.mark.parametrize("value", ANY_JSON, ids=repr)
def test_members_of_any_type_never_raise_anything_else(model: Path, value: Any) -> None:
    method = {"quant_method": "fp8"}
    groups = (value, {"0": value}, {"0": {"weights": value, "input_activations": value}})
    nested = [
        *({**method, name: value} for name in READ_OF_QUANTIZATION),
        *({**method, "config_groups": each} for each in groups),
    ]
    whole = (model / "config.json").read_text()
    memory = Memory(2**40, "its GPU")
    for fields in [
        *({name: value} for name in READ),
        *({"quantization_config": each} for each in nested),
    ]:
        (model / "config.json").write_text(whole)
        change(model, **fields)
        with suppress(ConfigError):
            check(model, device="cuda", memory=memory)
        assert main(["doctor", "--model", str(model), "--device", "cpu"]) in (0, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["AnyForCausalLM"], "model_type": "unknown"},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_chunk_size": 8192, "max_position_embeddings": 8192},
    ],
)
def test_a_model_that_ranks_serve(model: Path, fields: dict[str, Any]) -> None:
    change(model, **fields)
    check(model, device="cuda")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-modle-len", "1"], "no option --max-modle-len; did you mean --max-model-len?"),
        (["--max-num-seqs", "many"], "--max-num-seqs takes a whole number, not 'many'"),
        (["--dtype", "int8"], "--dtype cannot be 'int8': use one of auto, "),
        (["stray"], "'stray' is no option"),
        *(
            (["--gpu-memory-utilization", value], f"utilization takes a number, not '{value}'")
            for value in ("None", "", "nan", "inf", "1e999", "1e5.", "0x1")
        ),
        (["--gpu-memory-utilization", "0"], "utilization 0: use a number above 0"),
        (["--gpu-memory-utilization", "-1"], "utilization -1: use a number above 0"),
        (["--gpu-memory-utilization", "1.1"], "utilization 1.1: use a number above 0"),
        (["--cpu-offload-gb", "None"], "--cpu-offload-gb takes a number, not 'None'"),
        (["--cpu-offload-gb", "-1"], "--cpu-offload-gb -1: use 0 or more"),
        (["--gpu-memory-utilization.x", "1"], "takes a number and has no parts"),
        (["--kv-cache-dtype", "fp8_e5m2"], "KV cache type 'fp8_e5m2' cannot be served"),
        (["--kv-cache-dtype-skip-layers", "0"], "layers with KV of another type cannot be served"),
        (["--enable-lora"], "LoRA adapters cannot be served"),
        (["--speculative-config", "{}"], "speculative decoding cannot be served"),
        (["-tp", "2"], "leave out --tensor-parallel-size"),
        (["--api-key", "k"], "--api-key is not offered: set gateway.keys_file"),
        (["--quantization", "fp8"], "quantization 'fp8' on CPU"),
    ],
)
def test_an_option_that_cannot_be(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(MODEL_DIR, *words)
    assert sentence in str(refused.value)


def test_weights_that_exceed_the_memory() -> None:
    size = (MODEL_DIR / "model.safetensors").stat().st_size
    check(MODEL_DIR, memory=Memory(2 * size, "this machine"))
    with pytest.raises(ConfigError, match=r"in 2 ranks, but this machine has .* use --ranks 1"):
        check(MODEL_DIR, memory=Memory(2 * size - 1, "this machine"))
    with pytest.raises(ConfigError, match=r"in a device, but its GPU has .* use --weight-parts 2"):
        check(MODEL_DIR, device="cuda", memory=Memory(size, "its GPU"))
    options = ("--gpu-memory-utilization", "1")
    check(MODEL_DIR, *options, device="cuda", memory=Memory(size, "its GPU"))
    with pytest.raises(ConfigError, match="larger devices"):
        check(MODEL_DIR, *options, device="cuda", memory=Memory(size // 9, "its GPU"))


@pytest.mark.parametrize(
    "words",
    [
        ["--cpu-offload-gb", "0"],
        ["--cpu-offload-gb", "0.0"],
        ["--cpu-offload-gb=0e3"],
        ["--quantization", "None"],
        ["--quantization="],
        ["--speculative-config", "None", "--kv-transfer-config", "None", "--revision", "None"],
    ],
)
def test_an_option_of_nothing_is_as_good_as_none(words: list[str]) -> None:
    size = (MODEL_DIR / "model.safetensors").stat().st_size
    device: dict[str, Any] = {"device": "cuda"}
    check(MODEL_DIR, *words, memory=Memory(2 * size, "its GPU"), **device)
    with pytest.raises(ConfigError, match="in a device, but its GPU has room"):
        check(MODEL_DIR, *words, memory=Memory(size, "its GPU"), **device)
    check(MODEL_DIR, "--cpu-offload-gb", "0.5", memory=Memory(size, "its GPU"), **device)


INDEX, MISTRAL_INDEX = "model.safetensors.index.json", "consolidated.safetensors.index.json"


def test_weights_in_two_forms_count_once(model: Path) -> None:
    """vLLM prefers Mistral's own form, and an index to the names of files."""
    size = (model / "model.safetensors").stat().st_size
    whole, other = model / "consolidated.safetensors", model / "model-2.safetensors"
    shutil.copy(model / "model.safetensors", whole)
    files = find_model(str(model), {}, ask_nobody)
    assert weight_paths(model) == [whole]
    assert weight_paths(model, "safetensors") == [model / "model.safetensors"]
    assert weight_bytes(files) == weight_bytes(files, "safetensors") == size
    check(model, memory=Memory(2 * size, "this machine"))
    shutil.copy(whole, other)
    assert weight_bytes(files, "safetensors") == 2 * size
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": other.name, "b": other.name}}))
    assert weight_paths(model) == [whole]
    assert weight_paths(model, "safetensors") == [other]
    assert weight_bytes(files, "safetensors") == size
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 7}}))
    (model / MISTRAL_INDEX).write_text(json.dumps({"metadata": {"total_size": 8}}))
    assert (weight_bytes(files), weight_bytes(files, "hf")) == (8, 7)
    whole.unlink()
    assert weight_bytes(files) == 7


@pytest.mark.parametrize("value", ANY_JSON, ids=repr)
def test_an_index_of_any_type_leaves_the_files_to_count(model: Path, value: Any) -> None:
    size = (model / "model.safetensors").stat().st_size
    for index in ({"metadata": value}, {"weight_map": value}, {"metadata": {"total_size": value}}):
        (model / INDEX).write_text(json.dumps(index))
        assert weight_bytes(find_model(str(model), {}, ask_nobody)) == size
    (model / INDEX).write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        check(model, "--load-format", "dummy", memory=Memory(size, "this machine"))


def test_ranks_that_borrow_hold_a_part_of_the_feed_forward_layers() -> None:
    """57 % of the demo model; with all linear layers in parts a rank holds less."""
    size = (MODEL_DIR / "model.safetensors").stat().st_size
    halves: dict[str, Any] = {"device": "cuda", "weight_parts": 2}
    room = ("--gpu-memory-utilization", "1")
    ffn = Memory(int(size * 0.72), "its GPU")
    check(MODEL_DIR, *room, memory=ffn, **halves)
    less = Memory(int(size * 0.71), "its GPU")
    with pytest.raises(ConfigError, match=r"use --weight-parts 2 --borrow all, so that .* of all"):
        check(MODEL_DIR, *room, memory=less, **halves)
    halves["borrow"] = "all"
    check(MODEL_DIR, *room, memory=less, **halves)
    halves |= {"borrow": "ffn", "whole_layers": 2}
    with pytest.raises(ConfigError, match=r"use fewer --whole-layers\."):
        check(MODEL_DIR, *room, memory=ffn, **halves)
    halves["whole_layers"] = 5
    with pytest.raises(ConfigError, match=r"whole_layers is 5, and the model has 5 layers"):
        check(MODEL_DIR, **halves)


def test_one_rank_may_hold_all_layers_and_another_borrow() -> None:
    size = (MODEL_DIR / "model.safetensors").stat().st_size
    halves: dict[str, Any] = {"weight_parts": 2, "whole_layers": (5, 0)}
    check(MODEL_DIR, **halves)
    with pytest.raises(ConfigError, match=r"names 6, but the model has 5 layers"):
        check(MODEL_DIR, weight_parts=2, whole_layers=(6, 0))
    with pytest.raises(ConfigError, match="hold all of them"):
        check(MODEL_DIR, weight_parts=2, whole_layers=(5, 5))
    # Together they hold 1.72 models of fp32; one of them holds all of it.
    check(MODEL_DIR, memory=Memory(int(size * 1.73), "this machine"), **halves)
    with pytest.raises(ConfigError, match="2 ranks"):
        check(MODEL_DIR, memory=Memory(int(size * 1.70), "this machine"), **halves)
    room = ("--gpu-memory-utilization", "1")
    with pytest.raises(ConfigError, match="a device"):
        check(MODEL_DIR, *room, memory=Memory(int(size * 0.99), "its GPU"), device="cuda", **halves)


def test_gpus_are_read_with_their_memory() -> None:
    listing = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA GB10, [N/A]\n\n"
    assert read_gpus(listing) == (("NVIDIA H100 80GB HBM3", 81559 * 2**20), ("NVIDIA GB10", 0))
    assert host_memory_bytes() > 2**28


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["up", "--model", "/no/where"], "/no/where is no folder: check the path."),
        (["up", "--keys", "/no/keys"], "cannot read the keys in /no/keys"),
        (["up", "--", "--enable-lora"], "LoRA adapters cannot be served yet"),
    ],
)
def test_the_command_refuses_within_two_seconds(words: list[str], sentence: str) -> None:
    before_s = cpu_s(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert sentence in ran.stderr.splitlines()[-1]
    assert cpu_s(resource.RUSAGE_CHILDREN) - before_s < LIMIT_S


def cpu_s(whose: int) -> float:
    """What this process, or its children that have ended, computed: a busy machine changes it less.

    Nothing of what these tests run waits.
    """
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def test_doctor_judges_a_model_without_an_engine(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before_s = cpu_s(resource.RUSAGE_SELF)
    assert main(["doctor", "--model", str(model), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, for 2 cpu ranks" in said
    assert "ok       tested    " in said
    change(model, architectures=["UnheardOfForCausalLM"])
    assert main(["doctor", "--model", str(model), "--device", "cpu"]) == 0
    assert "note     tested    no test covers UnheardOfForCausalLM" in capsys.readouterr().out
    change(model, mamba_d_state=16)
    assert main(["doctor", "--model", str(model), "--device", "cpu"]) == 1
    assert "recurrent state, which has no heads" in capsys.readouterr().out
    assert main(["doctor", "--model", str(MODEL_DIR), "--", "--max-modle-len", "1"]) == 1
    assert "did you mean --max-model-len?" in capsys.readouterr().out
    assert cpu_s(resource.RUSAGE_SELF) - before_s < 4 * LIMIT_S
