"""Tiny checkpoints of multimodal classes, whose text is that of a family with stored references."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.harness.vllm.families import BY_SLUG, Family
from tests.harness.vllm.tiny_models import make_family

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Multimodal:
    """One multimodal class."""

    name: str
    kind: str
    """transformers' `model_type`."""
    architecture: str
    text: Family
    vision: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


MULTIMODAL = (
    Multimodal(
        "Gemma 3",
        "gemma3",
        "Gemma3ForConditionalGeneration",
        BY_SLUG["gemma-3-text"],
        fields={
            "mm_tokens_per_image": 4,
            "image_token_index": 4000,
            "boi_token_index": 4001,
            "eoi_token_index": 4002,
        },
    ),
    Multimodal(
        "Mistral Small 3.1",
        "mistral3",
        "Mistral3ForConditionalGeneration",
        BY_SLUG["mistral"],
        {
            "model_type": "pixtral",
        },
        {
            "image_token_index": 4000,
            "spatial_merge_size": 2,
        },
    ),
    Multimodal(
        "Llama 4",
        "llama4",
        "Llama4ForConditionalGeneration",
        BY_SLUG["llama-4-text-one-chunk"],
        {
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        {"image_token_index": 4000, "boi_token_index": 4001, "eoi_token_index": 4002},
    ),
)


def make_multimodal(multimodal: Multimodal, folder: Path) -> Path:
    """Write a checkpoint of the class with the text family's weights; returns its folder."""
    text = make_family(multimodal.text, folder / "text")
    text_config = AutoConfig.from_pretrained(text)
    config = AutoConfig.for_model(
        multimodal.kind,
        text_config=text_config.to_dict(),
        tie_word_embeddings=text_config.tie_word_embeddings,
        vision_config={**VISION, **multimodal.vision},
        **multimodal.fields,
    )
    whole: Any = AutoModelForImageTextToText.from_config(config).float()
    own = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    if hasattr(whole, "model"):
        whole.model.language_model.load_state_dict(own.model.state_dict())
        whole.lm_head.load_state_dict(own.lm_head.state_dict())
    else:
        whole.language_model.load_state_dict(own.state_dict())
    made = folder / multimodal.kind
    whole.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((text / name).read_bytes())
    return made
