"""How many weights a model has, by what divides them between ranks. From config.json. Pure.

It counts matrices, norms and routers, and leaves out biases, which are below 0.5 % of any model.
Token embeddings and the lm_head have as many rows as vLLM gives them: a multiple of 64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY_MULTIPLE = 64
"""vLLM pads token embeddings and lm_head to multiples of this; a test compares it."""
GATED, PLAIN = 3, 2
"""Matrices of a feed-forward network: gate, up and down, or up and down."""
_PLAIN_TYPES = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "mpt"),
        *("falcon", "phi", "starcoder2", "nemotron", "arcee", "apertus", "persimmon"),
    }
)
"""Model types whose feed-forward networks have no gate."""
_TIED_TYPES = frozenset(
    {
        *("gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "gpt2", "gpt_bigcode"),
        *("gpt_neo", "smollm3", "starcoder2", "ernie4_5", "opt", "bloom", "mpt", "falcon"),
    }
)
"""Model types whose lm_head is the embeddings unless config.json says otherwise."""
_POSITION_TYPES = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt"})
"""Model types with a learned table of positions."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_POSITIONS = ("n_positions", "max_position_embeddings")
_DEFAULT_INNER = 4
"""A feed-forward network's width over the hidden size where config.json does not name it."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of a model's layers, and its elements by kind; none is negative."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Inner features of a token's feed-forward network, or of all its experts together."""
    rows: int
    """Rows of the embeddings and of the lm_head, with padding."""
    is_tied: bool
    """Whether the lm_head is the embeddings."""
    experts: int
    """Experts of a layer; 0 if it has none."""
    expert_layers: int
    expert_elements: int
    """All experts of one layer that has them."""
    dense_elements: int
    """The feed-forward network of one layer without experts."""
    shared_elements: int
    """The experts of a layer that compute every token."""
    small_elements: int
    """Norms, routers and positions: every rank holds all of them."""
    rope_elements: int
    """vLLM's table of cosines and sines, which is no weight of the checkpoint."""

    @property
    def embeddings(self) -> int:
        """Elements of the token embeddings, with padding."""
        return self.rows * self.hidden

    @property
    def lm_head(self) -> int:
        """Elements of the lm_head, with padding; 0 if it is the embeddings."""
        return 0 if self.is_tied else self.embeddings

    @property
    def qkv_layer(self) -> int:
        """Elements of one layer's projections of q, k and v."""
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def output_layer(self) -> int:
        """Elements of one layer's projection of the attention's output."""
        return self.hidden * self.head_dim * self.heads

    @property
    def attention(self) -> int:
        """Elements of all projections of attentions."""
        return self.layers * (self.qkv_layer + self.output_layer)

    @property
    def feed_forward(self) -> int:
        """Elements of all feed-forward networks and experts."""
        dense_layers = self.layers - self.expert_layers
        of_experts = self.expert_elements + self.shared_elements
        return dense_layers * self.dense_elements + self.expert_layers * of_experts

    @property
    def elements(self) -> int:
        """All elements of the checkpoint."""
        return (
            self.embeddings
            + self.lm_head
            + self.attention
            + self.feed_forward
            + self.small_elements
        )


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """Return the sizes of the model of this config.json; None if it does not say them."""
    try:
        return _read(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None


def billions_of(config: Mapping[str, Any]) -> float | None:
    """Return about how many billion weights the model has; None if that is unknown."""
    size = model_size(config)
    return None if size is None else size.elements / 1e9


def _read(config: Mapping[str, Any]) -> ModelSize:
    kind = str(config.get("model_type") or "")
    hidden, layers = int(_named(config, _HIDDEN)), int(_named(config, _LAYERS))
    heads = int(_named(config, _HEADS))
    head = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(_named(config, _KV_HEADS, 1 if config.get("multi_query") else heads))
    names = ("n_inner",) if config.get("n_embd") else _INNER
    inner = int(_named(config, names, _DEFAULT_INNER * hidden))
    matrices = PLAIN if kind in _PLAIN_TYPES else GATED
    experts = int(_named(config, _EXPERTS, 0))
    expert_inner = int((experts and config.get("moe_intermediate_size")) or inner)
    shared = int(config.get("shared_expert_intermediate_size") or 0) or (
        int(config.get("n_shared_experts") or 0) * expert_inner
    )
    if kind == "llama4_text":
        shared, inner = expert_inner, int(config.get("intermediate_size_mlp") or inner)
    expert_layers = _expert_layers(config, layers) if experts else 0
    vocabulary = int(config["vocab_size"])
    if min(hidden, layers, heads, head, kv_heads, inner, vocabulary) < 1:
        raise ValueError("a size is not positive")
    norms = layers * (2 * hidden + hidden * experts * bool(expert_layers)) + hidden
    learns_positions = kind in _POSITION_TYPES
    positions = int(_named(config, _POSITIONS, 0))
    rotated = int(head * float(config.get("partial_rotary_factor") or 1))
    tied = config.get("tie_word_embeddings")
    return ModelSize(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head,
        inner=expert_inner * experts if expert_layers else inner,
        rows=-(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        is_tied=kind in _TIED_TYPES if tied is None else bool(tied),
        experts=experts,
        expert_layers=expert_layers,
        expert_elements=GATED * hidden * expert_inner * experts,
        dense_elements=matrices * hidden * inner,
        shared_elements=GATED * hidden * shared,
        small_elements=norms + (positions * hidden if learns_positions else 0),
        rope_elements=0 if learns_positions else positions * rotated,
    )


def _named(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> Any:
    """Return the first value of these names; the default, or `KeyError`, if there is none."""
    found = next((config[name] for name in names if config.get(name)), default)
    if found is None:
        raise KeyError(names[0])
    return found


def _expert_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have experts."""
    dense = config.get("mlp_only_layers") or ()
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    first = int(config.get("first_k_dense_replace") or 0)
    return sum(
        number >= first and number not in dense and (number + 1) % step == 0
        for number in range(layers)
    )
