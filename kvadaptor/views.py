"""vLLM adapter: one KV buffer per rank, viewed per split in head-major layout.

The buffer is layer-major, pages of constant bytes inside a layer. Under width k vLLM sees k times
as many blocks of the same b tokens, each 1/k of a page: H/k heads (Flying Serving, equation 3, with
heads instead of tokens split). Block `k·page + s` of that view is slot s of the page, byte for byte
what the dp block `page` holds for those heads. A pipeline stage sees the blocks that
`Slots.first_blocks` numbers: all heads of its layers.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvadaptor.geometry import GeometryError, PageGeometry, Split
from kvadaptor.transfer.peers import allocate

Pages = npt.NDArray[np.int64]

LAYOUT = KVCacheLayout.LBHNC
"""Layer, block, head, token, channel: a block divides into per-head regions."""


def whole_specs(specs: dict[str, KVCacheSpec], config: VllmConfig) -> dict[str, FullAttentionSpec]:
    """Convert KV specs of one rank of any width to those of dp, for which pages are made.

    Layers with a sliding window have pages for all tokens too, so that all layers share them; their
    attention reads the window alone. Raises `GeometryError` for layers of another kind.
    """
    heads = config.model_config.get_total_num_kv_heads()
    own = max(1, heads // config.parallel_config.tensor_parallel_size)
    for name, spec in specs.items():
        if isinstance(spec, AttentionSpec) and spec.num_kv_heads != own:
            raise GeometryError(
                f"layer {name} has {spec.num_kv_heads} KV heads per rank, and config.json says "
                f"{own}: get the file again."
            )
    return {
        name: dataclasses.replace(_full(name, spec, config), num_kv_heads=heads)
        for name, spec in specs.items()
    }


def _full(name: str, spec: KVCacheSpec, config: VllmConfig) -> FullAttentionSpec:
    """Return the spec of a layer that has pages for all tokens."""
    if type(spec) is FullAttentionSpec:
        return spec
    if type(spec) is not SlidingWindowSpec:
        raise GeometryError(
            f"layer {name} has no plain attention ({type(spec).__name__}), so its KV cache cannot "
            "be split: serve a model whose layers all have full attention or sliding windows."
        )
    return FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        sliding_window=spec.sliding_window,
    )


def geometry_of(specs: dict[str, FullAttentionSpec]) -> PageGeometry:
    """Return the page geometry of a model's dp KV specs; `GeometryError` if its layers differ."""
    distinct = {dataclasses.replace(spec, sliding_window=None) for spec in specs.values()}
    if len(distinct) != 1:
        raise GeometryError(
            "the model has layers with different kinds of KV cache, so pages cannot be shared: "
            "serve a model whose layers all have heads of the same number and size."
        )
    spec = next(iter(distinct))
    return PageGeometry(
        num_layers=len(specs),
        num_kv_heads=spec.num_kv_heads,
        head_dim_k=spec.head_size,
        head_dim_v=spec.head_size_v if spec.head_size_v is not None else spec.head_size,
        dtype_bytes=spec.dtype.itemsize,
        tokens_per_slot=spec.block_size,
    )


def zero_pages(raw: torch.Tensor, geometry: PageGeometry, but: Pages) -> None:
    """Zero a rank's KV memory, (num_bytes,) int8, but for these (n,) pages."""
    if not but.size:
        raw.zero_()
        return
    words = raw.view(torch.int64) if geometry.layer_page_bytes % 8 == 0 else raw
    pages = raw.numel() // geometry.page_bytes
    changes = np.ones(pages, dtype=np.bool_)
    changes[but] = False
    others = torch.from_numpy(np.flatnonzero(changes)).to(raw.device)
    for layer in words.view(geometry.num_layers, pages, -1):
        layer.index_fill_(0, others, 0)


class KVBuffer:
    """All KV memory of a rank: one int8 tensor of num_pages pages, and its views per width."""

    def __init__(
        self,
        specs: dict[str, FullAttentionSpec],
        num_pages: int,
        device: torch.device,
        take: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`take` returns memory of the given bytes, (n,) int8; without it, memory is allocated."""
        self.geometry = geometry_of(specs)
        self.num_pages = num_pages
        self._layers = list(specs)
        # A spec with a window keeps vLLM from computing shared prefixes as if there were none.
        self._spec = min(specs.values(), key=lambda spec: spec.sliding_window is None)
        if self._spec.page_size_bytes != self.geometry.layer_page_bytes:
            raise GeometryError(
                "vLLM pads this model's KV pages, so they cannot be split: serve another model."
            )
        num_bytes = num_pages * self.geometry.page_bytes
        self.raw = take(num_bytes) if take is not None else allocate(num_bytes, device)

    def logical_config(self, split: Split) -> KVCacheConfig:
        """Return the configuration of a group's scheduler: num_pages·slots blocks of b tokens."""
        config = self.config(split)
        config.num_blocks = self.num_pages * self.geometry.slots(split).count
        return config

    def config(self, split: Split, place: int = 0) -> KVCacheConfig:
        """Return vLLM's KV configuration for the member of a group at this place.

        It has the layers of the member's stage, and blocks as `Slots.first_blocks` numbers them.
        """
        slots = self.geometry.slots(split)
        first = split.share_of(place) // split.tp * slots.layers
        layers = self._layers[first : first + slots.layers]
        spec = dataclasses.replace(self._spec, num_kv_heads=slots.heads)
        page_bytes = self.geometry.layer_page_bytes
        if spec.page_size_bytes * slots.columns != page_bytes:
            raise GeometryError(
                f"{slots.columns} slots of {spec.page_size_bytes} bytes do not fill a page."
            )
        tensor = KVCacheTensor(
            size=self.raw.numel(),
            layers=layers,
            layer_stride=page_bytes * self.num_pages,
            block_stride=page_bytes // slots.columns,
        )
        config = KVCacheConfig(
            num_blocks=slots.num_blocks(self.num_pages),
            kv_cache_tensors=[tensor],
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        )
        config.kv_cache_layout = LAYOUT.name
        return config

    def views(self, config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """Return layer name -> (blocks, heads, b, 2·D) view of the buffer, for one of `config`."""
        spec = config.kv_cache_groups[0].kv_cache_spec
        tensors = create_kv_cache_views(
            self.raw, spec, config.num_blocks, LAYOUT, config.kv_cache_tensors[0], spec.block_size
        )
        return dict(zip(config.kv_cache_tensors[0].layers, tensors, strict=True))
