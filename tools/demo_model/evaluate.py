"""Held-out loss of a demo model folder: `python -m tools.demo_model.evaluate [--model DIR]`.

Definition: tokenize heldout.txt without special tokens, cut the ids into windows of 511, put one
bos in front of each (512 positions), and take the mean negative log likelihood, in nats, over all
tokens except these bos. The last, shorter window counts too. Weights are upcast to float32.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker.demo import MODEL_DIR

WINDOW = 512


def mean_loss(model: Any, ids: list[int], bos: int) -> float:
    """Return the mean nats per token of `ids`, as defined in the module docstring."""
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(ids), WINDOW - 1):
        window = torch.tensor([[bos, *ids[start : start + WINDOW - 1]]])
        with torch.no_grad():
            logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    model.train(was_training)
    return total / len(ids)


def held_out_loss(folder: Path, max_tokens: int | None = None) -> tuple[float, int]:
    """Return the loss of the folder on its own heldout.txt, and the number of tokens used."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    # Not verbose: the text exceeds the context on purpose; it is cut into windows.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    return mean_loss(model, ids, tokenizer.bos_token_id), len(ids)


def main() -> None:
    """Print the loss of a model folder as one line of JSON."""
    parser = argparse.ArgumentParser(description="Recompute the held-out loss of a model folder.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="model folder")
    parser.add_argument(
        "--max-tokens", type=int, default=None, help="use at most this number of tokens"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loss, tokens = held_out_loss(options.model, options.max_tokens)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    report = {
        "held_out_loss": round(loss, 4),
        "uniform_loss": round(math.log(vocabulary), 4),
        "tokens": tokens,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
