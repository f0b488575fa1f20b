"""Trains the demo model from scratch: `python -m tools.demo_model.train --out DIR --minutes 25`.

The schedule follows the clock instead of a step count, so a run ends on time on any machine. Every
few minutes a usable model replaces the folder, and a state file next to it lets the same command
resume a stopped run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from tools.demo_model import corpus, evaluate
from tools.demo_model.tokenizer import MAX_LENGTH, VOCAB_SIZE, save_tokenizer, train_tokenizer
from worker.demo import MODEL_DIR

Ids: TypeAlias = NDArray[np.uint16]

PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE_SHARE = 0.02
WARMUP_SHARE = 0.03
WEIGHT_DECAY = 0.1
TOKENS_PER_STEP = 2048
# (until this share of the time, sequence length): long sequences cost more per token, so the model
# sees them only at the end, enough to learn far positions.
SEQUENCE_PHASES = ((0.80, 512), (0.92, 1024), (1.0, 2048))


@dataclass
class Progress:
    """The state of a resumed run besides the weights and the optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    cursor: int = 0
    recent_losses: list[float] = field(default_factory=list)


class TokenStream:
    """Windows of the joined documents, each once per epoch, in random order.

    A batch must mix distant places: consecutive windows come from one file, and the model hardly
    learns from updates that see one file at a time.
    """

    def __init__(self, documents: list[Ids], seed: int, progress: Progress) -> None:
        order = list(range(len(documents)))
        random.Random(seed).shuffle(order)
        self._row: Ids = np.concatenate([documents[i] for i in order])
        self._seed = seed
        self._progress = progress

    def next_batch(self, length: int) -> torch.Tensor:
        """Return sequences of `length`, TOKENS_PER_STEP ids in all."""
        place = self._progress
        if place.cursor + TOKENS_PER_STEP > len(self._row) - length:
            place.epoch, place.cursor = place.epoch + 1, 0
        # Seeded by the epoch, so that a resumed run continues in the same order.
        generator = np.random.default_rng((self._seed, place.epoch, length))
        order = generator.permutation((len(self._row) - length) // length)
        shift = int(generator.integers(length))
        first = place.cursor // length
        starts = order[first : first + TOKENS_PER_STEP // length] * length + shift
        place.cursor += TOKENS_PER_STEP
        rows = np.stack([self._row[start : start + length] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


def model_config() -> LlamaConfig:
    """Return the demo model's shape: some 4.7 million parameters."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        # Wider than the usual 0.02, with which so narrow a network starts too quietly.
        initializer_range=0.05,
    )


def new_model() -> LlamaForCausalLM:
    """Return a model with random weights."""
    return LlamaForCausalLM(model_config())


def generation_config() -> GenerationConfig:
    """Sampling by default: a model this small repeats itself when decoded greedily."""
    return GenerationConfig(
        bos_token_id=1, eos_token_id=3, pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.95
    )


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`; train it first if there is none."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(train_tokenizer(corpus.training_documents()), folder)
    return AutoTokenizer.from_pretrained(folder)


def encode_corpus(tokenizer: Any) -> list[Ids]:
    """Return plain documents and rendered dialogues, each with its bos and its end."""
    texts = [
        tokenizer.bos_token + text + tokenizer.eos_token for text in corpus.training_documents()
    ]
    texts += [tokenizer.apply_chat_template(d, tokenize=False) for d in corpus.dialogues()]
    core = tokenizer.backend_tokenizer
    return [
        np.array(e.ids, dtype=np.uint16) for e in core.encode_batch(texts, add_special_tokens=False)
    ]


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices only: shrinking the norms' gains helps nothing."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), fused=True)


def learning_rate(share: float) -> float:
    """Linear warm-up, then a cosine to a small rest, over the share of time used."""
    if share < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * (share + 1e-3) / WARMUP_SHARE
    angle = math.pi * min(1.0, (share - WARMUP_SHARE) / (1 - WARMUP_SHARE))
    rest = FINAL_LEARNING_RATE_SHARE
    return PEAK_LEARNING_RATE * (rest + (1 - rest) * 0.5 * (1 + math.cos(angle)))


def sequence_length(share: float) -> int:
    """Return the sequence length of the phase at this share of the time."""
    return next((length for until, length in SEQUENCE_PHASES if share < until), MAX_LENGTH)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.AdamW, batch: torch.Tensor) -> float:
    """Run one update; bfloat16 autocast was nearly twice as fast on the build machine."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten()
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def export(model: LlamaForCausalLM, tokenizer: Any, out: Path, progress: Progress) -> float:
    """Replace the folder's files one by one with a finished copy; returns the loss.

    The loss is that of the saved (bfloat16) weights, as a user of the folder measures it.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as name:
        folder = Path(name)
        copy = new_model()
        copy.bfloat16()
        copy.load_state_dict(model.state_dict())
        copy.generation_config = generation_config()
        copy.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        (folder / "heldout.txt").write_text(corpus.held_out_text(), encoding="utf-8")
        loss, tokens = evaluate.held_out_loss(folder)
        _write_report(folder / "training.json", model, loss, tokens, progress)
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)  # safetensors makes its file private
            if path.name != "training.json":
                path.replace(out / path.name)
        (folder / "training.json").replace(out.parent / "training.json")
    return loss


def _write_report(
    path: Path, model: LlamaForCausalLM, loss: float, held_out_tokens: int, progress: Progress
) -> None:
    uniform = math.log(VOCAB_SIZE)
    report = {
        "held_out_loss": round(loss, 4),
        "uniform_loss": round(uniform, 4),
        "nats_below_uniform": round(uniform - loss, 4),
        "held_out_tokens": held_out_tokens,
        "params": sum(p.numel() for p in model.parameters()),
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "seconds": round(progress.seconds),
        "epochs": progress.epoch,
        "recent_training_loss": round(float(np.mean(progress.recent_losses or [uniform])), 4),
        "hardware": f"{torch.get_num_threads()} CPU cores",
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, progress: Progress
) -> None:
    """Write everything a resumed run needs, replacing the last state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> Progress:
    """Continue a stopped run; a missing file means a new run."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def run(options: argparse.Namespace) -> None:
    """Train until the time is used, exporting the folder every few minutes."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    disable_progress_bar()
    out: Path = options.out
    state_file = out.with_name(f".{out.name}.state") / "state.pt"
    tokenizer = load_tokenizer(out)
    documents = encode_corpus(tokenizer)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens", flush=True)

    model = new_model()
    optimizer = make_optimizer(model)
    progress = load_state(state_file, model, optimizer)
    stream = TokenStream(documents, options.seed, progress)
    budget = options.minutes * 60.0
    # The first export comes early: a barely trained folder is enough to build against.
    next_save = progress.seconds + min(60.0, options.save_every)
    while progress.seconds < budget:
        started = time.perf_counter()
        share = progress.seconds / budget
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share)
        length = sequence_length(share)
        loss = train_step(model, optimizer, stream.next_batch(length))
        progress.recent_losses = [*progress.recent_losses[-99:], loss]
        progress.step += 1
        progress.tokens += TOKENS_PER_STEP
        progress.seconds += time.perf_counter() - started
        if progress.step % 50 == 0:
            print(
                f"{100 * share:5.1f} %  step {progress.step}  {progress.seconds:.0f} s  "
                f"{progress.tokens / progress.seconds:.0f} tokens/s  length {length}  "
                f"loss {np.mean(progress.recent_losses[-50:]):.3f}",
                flush=True,
            )
        if progress.seconds >= next_save:
            save_state(state_file, model, optimizer, progress)
            print(f"saved, held-out loss {export(model, tokenizer, out, progress):.4f}", flush=True)
            next_save = progress.seconds + options.save_every
    print(f"done, held-out loss {export(model, tokenizer, out, progress):.4f}", flush=True)
    shutil.rmtree(state_file.parent, ignore_errors=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model on the standard library.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model folder to write")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="training time, without set-up and exports"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=150.0, help="seconds between exports")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
