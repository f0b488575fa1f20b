"""vLLM adapter: the full replica, and module trees of the same model class made of views of it.

A tp tree is built on the meta device, so it allocates nothing. Its parameters are then replaced by
views: row ranges for column-parallel layers, strided column ranges for row-parallel ones (Flying
Serving, Model Weights Manager). `foreign_bytes` proves that a tree owns no byte outside of the
replica, and `worker.engine.weights.selftest` that it computes what a copy of its share would.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.utils.torch_utils import set_default_torch_dtype

from comm_pool.head_exchange import ExchangeError, HeadExchange
from coordinator.protocol.model_support import Holding, inner_refusal
from worker.engine.config import quantizes_weights, takes_views
from worker.engine.weights.fp8 import adopt_methods, bind_quantized, check_quantized, is_quantized
from worker.engine.weights.gated import view_gated
from worker.engine.weights.layers import (
    ShardMajorMerged,
    ShardMajorQKV,
    ShardPlan,
    ViewedColumn,
    ViewedReplicated,
    ViewedRow,
    ViewError,
    building,
    is_embedding,
    is_unviewed,
    own_range,
)
from worker.engine.weights.moe import (
    bind_experts,
    check_expert_count,
    check_experts,
    experts_of,
    is_moe,
    is_shared,
    mark_experts,
    real_expert_maps,
)
from worker.engine.weights.quantized_experts import unprocessed_experts

PLAIN_VOCABULARY = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
"""ModelOpt's checkpoints give the latter to an lm_head that they leave out."""
VIEWABLE_LINEARS = (ShardMajorQKV, ShardMajorMerged, ViewedColumn, ViewedReplicated, ViewedRow)


def load_replica(
    config: VllmConfig, shards: int, parts: int = 1, borrow: str = "none"
) -> nn.Module:
    """Load the whole model through vLLM's loader, its fused layers shard-major for `shards`.

    With several `parts`, load this rank's part: its place in vLLM's active tp group, which has
    `parts` members. The part covers heads, inner features, experts and output vocabulary; token
    embeddings are whole. Where ranks borrow `ffn`, heads and output vocabulary are whole too; where
    they borrow `all`, token embeddings are in parts as well.
    """
    check_widths(config, shards)
    plan = loading_plan(config, shards, parts, borrow)
    with building(plan):
        model = get_model(vllm_config=config)
    mark_experts(model, unviewed=plan.unviewed)
    _keep_plain_head(model)
    check_viewable(model, shards)
    view_gated(model)
    return model


def loading_plan(config: VllmConfig, shards: int, parts: int, borrow: str) -> ShardPlan:
    """Return the plan of the tree that `load_replica` fills; see there.

    Embeddings and lm_head that have one memory are whole where ranks borrow, and so is an lm_head
    that vLLM converts to another type in each step. Quantized parts are left as vLLM makes them if
    each rank holds one of its own: nobody needs a view, because tp of all ranks computes with the
    parts as they are. So are weights that could not be viewed of ranks that form no wide group.
    """
    model = config.model_config
    tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
    is_cast = model.head_dtype != model.dtype
    unviewed = quantizes_weights(config) and Holding(shards, parts, borrow).is_unviewed
    # A rank alone views nothing, but the self-test compares with weights that could be viewed.
    unviewed &= shards > 1 or not takes_views(config)
    return ShardPlan(
        shards,
        parts,
        loads=True,
        head_whole=borrow == "ffn" or (borrow == "all" and (tied or is_cast or unviewed)),
        attention_whole=borrow == "ffn",
        embeddings_whole=borrow != "all" or tied or unviewed,
        unviewed=unviewed,
    )


def check_widths(config: VllmConfig, width: int) -> None:
    """Refuse a width whose ranks would hold uneven shares of heads or of a layer."""
    model = config.model_config
    text = model.hf_text_config
    kv_heads, heads = model.get_total_num_kv_heads(), text.num_attention_heads
    try:
        HeadExchange(heads, kv_heads, width)
    except ExchangeError as error:
        raise ViewError(f"{error} Use smaller --widths.") from None
    check_expert_count(config, width)
    inner = inner_refusal(getattr(text, "intermediate_size", None), width)
    if inner is not None:
        raise ViewError(inner)


def _keep_plain_head(model: nn.Module) -> None:
    """Keep vLLM's CPU backend from packing a copy of the lm_head that views could not share."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.cpu_linear = nn.functional.linear


def check_viewable(model: nn.Module, shards: int) -> None:
    """Refuse layers whose memory is packed, transposed or unknown; nobody views a single shard."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and not is_unviewed(module) and shards > 1:
            check_experts(name, module)
        if is_shared(module):
            continue
        if isinstance(module, LinearBase) and not isinstance(module, VIEWABLE_LINEARS):
            raise ViewError(
                f"layer {name} is a {type(module).__name__}, whose weights ranks do not know how "
                "to share: serve a model of vLLM's plain parallel layers, or use --widths 1."
            )
        if is_quantized(module) and not is_unviewed(module):
            check_quantized(name, module)
        if isinstance(module, VocabParallelEmbedding) and not isinstance(
            module.quant_method, PLAIN_VOCABULARY
        ):
            raise ViewError(
                f"layer {name} has a quantized vocabulary, which cannot be viewed per rank yet: "
                "serve a checkpoint whose embeddings and lm_head are not quantized."
            )
        if isinstance(module, LinearBase) and not is_unviewed(module) and module.weight.dim() != 2:
            raise ViewError(
                f"layer {name} has packed weights, which cannot be viewed per rank: serve an "
                "unquantized checkpoint."
            )
        if isinstance(module, Attention) and module.attn_type != "decoder":
            raise ViewError(
                f"layer {name} is {module.attn_type}, not decoder attention: serve a decoder-only "
                "model."
            )


def build_tp_tree(
    config: VllmConfig, replica: nn.Module, *, shards: int, width: int, rank_in_group: int
) -> nn.Module:
    """Build one more tree of the model class for a tp rank of vLLM's active tp group."""
    model_config = config.model_config
    try:
        with (
            building(ShardPlan(shards, width)),
            real_expert_maps(next(replica.parameters()).device),
            set_default_torch_dtype(model_config.dtype),
            torch.device("meta"),
        ):
            tree = initialize_model(vllm_config=config, model_config=model_config)
    except ViewError:
        raise
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ViewError(
            f"vLLM cannot build the model for a rank of width {width} ({error}): leave this width "
            "out of --widths."
        ) from error
    loaded = _set_aside(tree, replica)
    adopt_methods(tree, replica)
    with unprocessed_experts(tree, is_moe=is_moe(config)):
        process_weights_after_loading(tree, model_config, torch.device("meta"))
    _bind_views(tree, replica, width, rank_in_group)
    for parent, child, layer in loaded:
        parent._modules[child] = layer
    if (name := unbound_tensor(tree)) is not None:
        raise ViewError(
            f"{name} cannot be viewed in width {width}: leave this width out of --widths, "
            "and please report it with the model's config.json."
        )
    return tree.eval()


def build_stage_tree(
    config: VllmConfig, replica: nn.Module, *, shards: int, width: int, rank_in_group: int
) -> nn.Module:
    """Build one more tree of the model class for a stage of vLLM's active pipeline group.

    It has a range of the replica's layers, or the rank's part of each in a stage `width` ranks
    wide, and no byte besides.
    """
    model, stages = config.model_config, config.parallel_config.pipeline_parallel_size
    layers = model.get_total_num_hidden_layers()
    if not model.is_pp_supported:
        raise ViewError(
            f"vLLM does not divide {model.architecture} into pipeline stages: leave out "
            "--pipelines."
        )
    if layers % stages:
        raise ViewError(
            f"{stages} pipeline stages do not divide the {layers} layers of this model: leave "
            f"pp{stages} out of --pipelines."
        )
    own = {"width": width, "rank_in_group": rank_in_group}
    return build_tp_tree(config, replica, shards=shards, **own)


def _set_aside(tree: nn.Module, replica: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Take layers out of a tree on meta in whose place loaded ones compute; return those.

    They are as (parent, name, loaded layer). vLLM's post-processing must see neither: what it makes
    of quantized weights is made once.
    """
    sources = dict(replica.named_modules(remove_duplicate=False))
    found = [
        (module, child, source)
        for path, module in tree.named_modules(remove_duplicate=False)
        for child in module._modules
        if is_unviewed(source := sources[f"{path}.{child}" if path else child])
    ]
    for parent, name, _ in found:
        parent._modules[name] = None
    return found


def _bind_views(tree: nn.Module, replica: nn.Module, width: int, rank: int) -> None:
    sources = dict(replica.named_modules(remove_duplicate=False))
    kernels = [
        (name, module) for name, module in tree.named_modules() if isinstance(module, Attention)
    ]
    per_head = {
        id(value)
        for _, attention in kernels
        for value in vars(attention.impl).values()
        if isinstance(value, nn.Parameter)
    }
    built = [
        (name, module, dict(module._parameters))
        for name, module in tree.named_modules(remove_duplicate=False)
    ]
    for name, module, _ in built:
        source = sources[name]
        if isinstance(module, PPMissingLayer) or _is_taken_over(source):
            continue  # Another stage has it, or its parent uses the replica's module instead.
        for child_name, child in source._modules.items():
            if child is not None and _is_taken_over(child):
                # Every rank has the whole table: no masked look-up, no all-reduce.
                module._modules[child_name] = child
        if isinstance(module, RoutedExperts):
            bind_experts(name, module, source, width, rank)
            continue
        if isinstance(module, ShardMajorMerged):
            module.row_wise = source.row_wise
        adopt_meta(module, source)
        if is_quantized(source):
            bind_quantized(name, module, source, width, rank)
            continue
        _add_loaded(name, module, source)
        _bind_parameters(name, module, source, width, rank, per_head)
    views: dict[int, torch.Tensor] = {}
    bound = dict(tree.named_modules(remove_duplicate=False))
    for name, _, parameters in built:
        now = bound[name]._parameters
        views |= {id(old): now[key] for key, old in parameters.items() if now.get(key) is not None}
    for module in tree.modules():
        _bind_helpers(module, views)
    for name, attention in kernels:
        _check_kernel(name, attention)


def _bind_parameters(
    name: str,
    module: nn.Module,
    source: nn.Module,
    width: int,
    rank: int,
    per_head: Collection[int],
) -> None:
    """Give a module views in place of its parameters.

    `per_head` are the parameters that attention's kernels read, whose heads a rank has a share of.
    """
    for param_name, param in module._parameters.items():
        if param is None:
            continue
        if id(param) in per_head:
            view = own_range(source._parameters[param_name].data, 0, width, rank, len(param))
        else:
            view = _shard(module, param_name, source, width, rank)
        if view.shape != param.shape:
            raise ViewError(
                f"{name}.{param_name} has shape {tuple(view.shape)} as a view, but width "
                f"{width} needs {tuple(param.shape)}: use smaller --widths."
            )
        module._parameters[param_name] = nn.Parameter(view, requires_grad=False)


def _add_loaded(name: str, module: nn.Module, source: nn.Module) -> None:
    """Add parameters that a loader creates only when a checkpoint has them, such as a head's bias.

    A tree on meta loads nothing, so it would compute without them.
    """
    for param_name, param in source._parameters.items():
        if param is None or module._parameters.get(param_name) is not None:
            continue
        if not isinstance(module, VocabParallelEmbedding):
            raise ViewError(
                f"{name}.{param_name} was created while the checkpoint was read, and ranks do not "
                "know how to share it: use --widths 1."
            )
        shape = (module.num_embeddings_per_partition, *param.shape[1:])
        empty = torch.empty(shape, dtype=param.dtype, device="meta")
        module._parameters[param_name] = nn.Parameter(empty, requires_grad=False)


def _bind_helpers(module: nn.Module, views: Mapping[int, torch.Tensor]) -> None:
    """Give vLLM's helpers of a module, such as routers, the views of parameters that they hold."""
    for helper in list(vars(module).values()):
        if isinstance(helper, (torch.Tensor, nn.Module, type)):
            continue
        if not type(helper).__module__.startswith("vllm."):
            continue
        for attribute, value in list(getattr(helper, "__dict__", {}).items()):
            if isinstance(value, torch.Tensor) and (view := views.get(id(value))) is not None:
                setattr(helper, attribute, view)


def _check_kernel(name: str, attention: Attention) -> None:
    """Refuse attention whose kernel computes with numbers that were never loaded."""
    for attribute, value in vars(attention.impl).items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ViewError(
                f"layer {name} attends with numbers of its own per head ({attribute}), which ranks "
                "do not know how to share: use --widths 1."
            )


def _is_taken_over(source: nn.Module) -> bool:
    """Return whether trees use a loaded module itself."""
    return is_shared(source) or (is_embedding(source) and source.tp_size == 1)


def _shard(
    module: nn.Module, param_name: str, source: nn.Module, width: int, rank: int
) -> torch.Tensor:
    """Return a rank's share of a source, which holds all of the model or a part of it."""
    full: torch.Tensor = source._parameters[param_name].data
    if isinstance(module, VocabParallelEmbedding):
        return own_range(full, 0, width, rank, module.num_embeddings_per_partition)
    if isinstance(module, ColumnParallelLinear):
        return own_range(full, 0, width, rank, module.output_size_per_partition)
    if isinstance(module, RowParallelLinear):
        if param_name != "weight":
            return full
        return own_range(full, 1, width, rank, module.input_size_per_partition)
    return loaded_range(module._parameters[param_name], full)


def loaded_range(param: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """View the range of a tensor that a rank's own loader would copy into its parameter.

    A tensor of the same shape is returned unchanged, and so is one without such a range, which the
    caller refuses.
    """
    dims = [
        dim
        for dim, (own, size) in enumerate(zip(param.shape, full.shape, strict=False))
        if own != size
    ]
    loader = getattr(param, "weight_loader", None)
    if len(dims) != 1 or param.dim() != full.dim() or loader is None:
        return full
    loaded = nn.Parameter(torch.empty(param.shape, dtype=full.dtype, device=full.device))
    loaded.requires_grad_(requires_grad=False)
    vars(loaded).update(vars(param))
    loader(loaded, full)
    size = param.shape[dims[0]]
    starts = range(0, full.shape[dims[0]] - size + 1, size)
    ranges = (full.narrow(dims[0], start, size) for start in starts)
    return next((each for each in ranges if torch.equal(each, loaded)), full)


def adopt_meta(module: nn.Module, source: nn.Module) -> None:
    """Replace buffers and plain tensor attributes made on meta with the replica's."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _of_equal_shape(name, buffer, source._buffers[name])
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor) and value.is_meta:
            setattr(module, name, _of_equal_shape(name, value, getattr(source, name)))


def _of_equal_shape(name: str, own: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the replica's tensor; refuses one of which each rank has a share."""
    # Loading may give a scalar another shape.
    if own.shape != full.shape and full.numel() > 1:
        raise ViewError(
            f"the tensor {name} has shape {tuple(full.shape)} in all and {tuple(own.shape)} in a "
            "rank, which ranks do not know how to share: use --widths 1."
        )
    return full


def unbound_tensor(tree: nn.Module) -> str | None:
    """Return the name of a tensor that is still on meta; None if the tree has all of them."""
    return next((name for name, tensor in _tensors(tree) if tensor.is_meta), None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _storages(model: nn.Module) -> dict[int, int]:
    """Map the address of each storage with parameters or buffers of the model to its bytes."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, tensor in _tensors(model)
        if tensor.numel()
    }


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all distinct storages of a model."""
    return sum(_storages(model).values())


def foreign_bytes(tree: nn.Module, replica: nn.Module, lent: Collection[torch.Tensor] = ()) -> int:
    """Return the bytes that `tree` owns outside of `replica`'s storages; 0 for a view tree.

    `lent` are memory that a tree has from its peers or borrows into.

    A rank's map of its experts, some bytes per layer, is no weight and does not count.
    """
    own = _storages(replica)
    own |= {each.untyped_storage().data_ptr(): 0 for each in lent}
    own |= {
        experts._expert_map.untyped_storage().data_ptr(): 0
        for _, experts in experts_of(tree)
        if experts._expert_map is not None
    }
    return sum(size for address, size in _storages(tree).items() if address not in own)
