"""Random requests for runs that switch while they are served: one seed, one request."""

import os
import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = range(10, 4000)
END_OF_TEXT = 3
PROMPT_TOKENS = (5, 400)
SHARED_PREFIXES = 6
"""Prompts that share one start with the same of so many texts."""

WORDS = "([a-z]{1,9} ){60}"
"""A grammar that is never complete within the tokens that a request may make."""


@dataclass(frozen=True)
class Case:
    """One request; `leaves_after`: its client is gone after so many tokens."""

    seed: int
    prompt: list[int]
    params: dict[str, Any]
    leaves_after: int | None

    @property
    def is_greedy(self) -> bool:
        """Plain vLLM generates the same tokens."""
        return float(self.params["temperature"]) == 0.0


def draw_case(seed: int) -> Case:
    """The request of a seed."""
    draw = random.Random(seed)
    length = draw.randint(*PROMPT_TOKENS)
    prompt = draw.choices(VOCABULARY, k=length)
    if draw.random() < 0.5:
        number = draw.randrange(SHARED_PREFIXES)
        shared = random.Random(f"prefix {number}").choices(VOCABULARY, k=40 + 40 * number)
        prompt = (shared + prompt)[: max(length, PROMPT_TOKENS[0])]
    leaves_after = draw.randint(0, 40) if draw.random() < 0.12 else None
    return Case(seed, prompt, _params(draw, seed), leaves_after)


def _params(draw: random.Random, seed: int) -> dict[str, Any]:
    is_greedy = draw.random() < 0.5
    params: dict[str, Any] = {
        "temperature": 0.0 if is_greedy else draw.choice([0.5, 0.8, 1.0, 1.4]),
        "seed": seed,
        "max_tokens": draw.randint(4, 70),
        "logprobs": 0,
    }
    if not is_greedy:
        options = {"top_p": (0.6, 0.95), "top_k": (5, 40), "min_p": (0.02, 0.1)}
        params |= {name: draw.choice(of) for name, of in options.items() if draw.random() < 0.4}
    penalties = {
        "presence_penalty": (-0.5, 0.7),
        "frequency_penalty": (0.2, 0.6),
        "repetition_penalty": (1.1, 1.3),
    }
    params |= {name: draw.choice(of) for name, of in penalties.items() if draw.random() < 0.2}
    if draw.random() < 0.3:
        # With `min_tokens` plain vLLM holds back the end of text as well, as if it were named.
        params["stop_token_ids"] = [END_OF_TEXT, *draw.sample(VOCABULARY, k=60)]
        params["min_tokens"] = draw.randint(0, params["max_tokens"])
    elif draw.random() < 0.12:
        params["regex"] = WORDS
    return params


def vllm_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams."""
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"ignore_eos": True, **params}
    regex = settings.pop("regex", None)
    if regex is not None:
        settings["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return settings


def wanted_cases(count: int) -> list[Case]:
    """Cases of the first seeds, or of those in AILERON_RESHARD_SEEDS, such as 17 or 100-199."""
    first, _, last = os.environ.get("AILERON_RESHARD_SEEDS", f"0-{count - 1}").partition("-")
    return [draw_case(seed) for seed in range(int(first), int(last or first) + 1)]
