"""What we rely on in vLLM 0.32.0's private parts; fails loudly when vLLM moves."""

import inspect
import pickle
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.device_communicators import (  # noqa: E402
    cuda_communicator,
    pynccl,
    shm_broadcast,
    symm_mem,
)
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    VocabParallelEmbedding,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    BlockHash,
    KVCacheBlockCopy,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.output import (  # noqa: E402
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.async_utils import AsyncOutput  # noqa: E402

from comm_pool.layout import Mode  # noqa: E402
from kvadaptor.geometry import Split  # noqa: E402
from kvadaptor.slot_table import SlotTable  # noqa: E402
from kvadaptor.translate import translate  # noqa: E402
from kvadaptor.views import KVBuffer  # noqa: E402
from tests.harness.kv.slots import slot_byte_range, slot_index  # noqa: E402
from tests.harness.vllm.mode_schedulers import base_config  # noqa: E402
from worker.engine.config import ModeKey, mode_config, sparse, thinned  # noqa: E402
from worker.engine.runners.cpu import PositionGenerator, position_seed  # noqa: E402
from worker.engine.scheduling.grants import BlockGrants  # noqa: E402
from worker.engine.scheduling.step_plan import StepPlan, give_lists, listed  # noqa: E402
from worker.engine.weights import layers  # noqa: E402


def test_version_is_the_pinned_one() -> None:
    assert vllm.__version__.startswith("0.32.0")


def test_active_tp_group_is_a_module_global_read_at_call_time() -> None:
    source = inspect.getsource(parallel_state.get_tp_group)
    assert "_TP" in source
    assert (
        "use_message_queue_broadcaster"
        in inspect.signature(parallel_state.init_model_parallel_group).parameters
    )


def test_step_queue_has_the_fields_that_we_set() -> None:
    ring = inspect.getsource(shm_broadcast.ShmRingBuffer)
    assert "is_creator" in ring
    assert "self.shared_memory" in ring
    assert "busy_loop_s" in inspect.signature(shm_broadcast.SpinCondition.__init__).parameters
    assert "timeout" in inspect.signature(shm_broadcast.MessageQueue.dequeue).parameters


def test_communicators_have_what_the_exchange_calls() -> None:
    for name in ("send", "recv"):
        assert "stream" in inspect.signature(getattr(pynccl.PyNcclCommunicator, name)).parameters
    assert {"group_start", "group_end"} <= set(vars(pynccl.PyNcclCommunicator))
    source = inspect.getsource(symm_mem.SymmMemCommunicator.__init__)
    assert "self.disabled = True" in source
    assert "self.buffer = " in source
    # It is asked before the buffer is used.
    should_use = inspect.getsource(symm_mem.SymmMemCommunicator.should_use_symm_mem)
    assert "if self.disabled" in should_use
    made = inspect.getsource(cuda_communicator.CudaCommunicator.__init__)
    assert "self.pynccl_comm" in made
    assert "self.symm_mem_comm" in made


def test_runner_and_scheduler_have_the_methods_that_we_override() -> None:
    for name in ("initialize_kv_cache_tensors", "_update_states", "_sample", "_dummy_run"):
        assert hasattr(CPUModelRunner, name), name
    for name in ("_handle_blocked_waiting_request", "finish_requests", "update_from_output"):
        assert hasattr(Scheduler, name), name


def test_our_layers_are_plugged_in() -> None:
    assert op_registry_oot["QKVParallelLinear"] is layers.ShardMajorQKV
    assert op_registry_oot["MergedColumnParallelLinear"] is layers.ShardMajorMerged
    assert op_registry_oot["RowParallelLinear"] is layers.ViewedRow


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_shard_major_rows_give_natural_order_back(shards: int, width: int) -> None:
    if width > shards:
        return
    sizes = (16 // shards, 8 // shards, 8 // shards)
    natural = torch.randn(32, 5)
    stored = torch.nn.Parameter(torch.zeros(32, 5), requires_grad=False)
    start = 0
    for number, part in enumerate(natural.split([16, 8, 8])):
        layers.scatter_shards(stored, part, shards, start, sizes[number])
        start += sizes[number]
    x = torch.randn(3, 5)
    expected = torch.nn.functional.linear(x, natural)
    q, k, v = (part.chunk(width, -1) for part in expected.split([16, 8, 8], -1))
    for rank in range(width):
        out = torch.nn.functional.linear(x, stored.data.chunk(width, 0)[rank])
        restored = layers.restore_natural_order(out, shards // width, sizes)
        torch.testing.assert_close(restored, torch.cat([q[rank], k[rank], v[rank]], -1))


@pytest.mark.parametrize(
    ("shards", "width", "kv_heads"), [(4, 1, 2), (4, 2, 2), (4, 4, 1), (8, 2, 2)]
)
def test_kv_heads_that_shards_share_come_out_once(shards: int, width: int, kv_heads: int) -> None:
    copies = shards // kv_heads
    q, k, v = torch.randn(16, 5), torch.randn(2 * kv_heads, 5), torch.randn(2 * kv_heads, 5)
    sizes = (16 // shards, 2, 2)
    stored = torch.nn.Parameter(torch.zeros(16 + 4 * shards, 5), requires_grad=False)
    spread = [part.unflatten(0, (kv_heads, 2)).repeat_interleave(copies, 0) for part in (k, v)]
    for start, part, size in zip(
        (0, sizes[0], sizes[0] + 2),
        (q, *(each.flatten(0, 1) for each in spread)),
        sizes,
        strict=True,
    ):
        layers.scatter_shards(stored, part, shards, start, size)
    x = torch.randn(3, 5)
    for rank in range(width):
        out = torch.nn.functional.linear(x, stored.data.chunk(width, 0)[rank])
        held = shards // width
        restored = layers.restore_natural_order(out, held, sizes, min(copies, held))
        first = rank * kv_heads // width
        mine = slice(2 * first, 2 * (first + max(1, kv_heads // width)))
        natural = torch.cat([q.chunk(width)[rank], k[mine], v[mine]])
        torch.testing.assert_close(restored, torch.nn.functional.linear(x, natural))


def test_a_part_of_a_fused_weight_is_its_run_of_shards() -> None:
    """Two parts of four shards, each with a piece of q and of k."""
    q, k = torch.arange(16.0).view(8, 2), 100 + torch.arange(8.0).view(4, 2)
    parts = []
    for part in range(2):
        plan = layers.ShardPlan(4, 2, loads=True)
        stored = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        for start, size, natural in ((0, 2, q), (2, 1, k)):
            own = layers.own_shards(natural, plan, part)
            layers.scatter_shards(stored, own, plan.held, start, size)
        parts.append(stored.data)
    whole = torch.nn.Parameter(torch.zeros(12, 2), requires_grad=False)
    for start, size, natural in ((0, 2, q), (2, 1, k)):
        layers.scatter_shards(whole, natural, 4, start, size)
    assert torch.equal(torch.cat(parts), whole.data)


def test_a_range_is_found_in_all_of_a_tensor_and_in_the_part_that_it_is_in() -> None:
    full = torch.arange(16).view(8, 2)
    for rank in range(4):
        wanted = full[2 * rank : 2 * rank + 2]
        half = full.chunk(2)[rank // 2]
        for source in (full, half, wanted):
            found = layers.own_range(source, 0, 4, rank, 2)
            assert torch.equal(found, wanted)
            assert found.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    assert layers.own_range(full, 1, 2, 1, 1)[:, 0].tolist() == full[:, 1].tolist()
    assert layers.own_range(full, 0, 4, 1, 3) is full, "its size is refused by the caller"


def test_a_fused_weight_that_does_not_divide_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(12, 2), requires_grad=False)
    with pytest.raises(layers.ViewError, match="--widths"):
        layers.scatter_shards(param, torch.zeros(6, 2), 4, 0, 1)


@pytest.fixture
def buffer() -> KVBuffer:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
    return KVBuffer({f"layer{i}": spec for i in range(3)}, 6, torch.device("cpu"))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_slot_is_the_bytes_that_the_geometry_says(buffer: KVBuffer, k: int) -> None:
    page, layer = 4, 1
    slots = buffer.geometry.slots_per_page(k)
    for slot in range(slots):
        buffer.raw.zero_()
        block = slot_index(buffer.geometry, page, slot, k)
        buffer.views(buffer.config(Split(1, k)))[f"layer{layer}"][block].fill_(1.0)
        touched = (buffer.raw.view(torch.float32) != 0).nonzero().flatten() * 4
        expected = slot_byte_range(buffer.geometry, layer, page, slot, k, buffer.num_pages)
        assert (int(touched.min()), int(touched.max()) + 4) == (expected.start, expected.stop)


@pytest.mark.parametrize("k", [2, 4])
def test_a_slot_holds_what_the_dp_page_holds_for_its_heads(buffer: KVBuffer, k: int) -> None:
    dp = buffer.views(buffer.config(Split(1, 1)))["layer2"]
    dp.copy_(torch.randn(dp.shape))
    per_rank = buffer.geometry.heads_per_rank(k)
    narrow = buffer.views(buffer.config(Split(1, k)))["layer2"]
    for slot in range(k):
        block = slot_index(buffer.geometry, 3, slot, k)
        assert torch.equal(narrow[block], dp[3, slot * per_rank : (slot + 1) * per_rank])
    assert narrow.untyped_storage().data_ptr() == buffer.raw.untyped_storage().data_ptr()


def test_grants_bound_what_vllms_block_pool_hands_out() -> None:
    pool = BlockPool(num_gpu_blocks=24, enable_caching=True, hash_block_size=16)
    grants = BlockGrants(pool, 4)
    assert (grants.free, grants.total) == (0, 0)
    with pytest.raises(ValueError, match="free blocks"):
        pool.get_new_blocks(1)
    grants.grant(np.array([1, 3]))
    assert (grants.free, grants.total) == (8, 8)
    blocks = pool.get_new_blocks(3)
    held = {block.block_id for block in blocks}
    assert held == {4, 5, 6}
    assert grants.withdraw(held).tolist() == [1]
    grants.grant(np.array([1, 2]))
    assert (grants.free, grants.total) == (5, 8)
    more = pool.get_new_blocks(5)
    assert {block.block_id for block in more} == {7, 8, 9, 10, 11}
    pool.free_blocks(blocks)
    pool.free_blocks(more)
    assert grants.withdraw(()).tolist() == []
    grants.grant(np.array([5]))
    assert (grants.free, grants.total) == (4, 4)
    grants.withdraw({20})
    with pytest.raises(AssertionError, match="not granted"):
        grants.grant(np.array([2]))


def test_a_parked_mode_forgets_what_its_free_blocks_held() -> None:
    pool = BlockPool(num_gpu_blocks=24, enable_caching=True, hash_block_size=16)
    grants = BlockGrants(pool, 4)
    grants.grant(np.array([1]))
    keys = [make_block_hash_with_group_id(BlockHash(name), 0) for name in (b"free", b"held")]
    blocks = pool.get_new_blocks(2)
    for key, block in zip(keys, blocks, strict=True):
        pool._insert_block_hash(key, block, num_tokens=16)
    pool.free_blocks(blocks[:1])
    grants.withdraw({blocks[1].block_id})
    grants.grant(np.array([1]))
    assert pool.get_cached_block(BlockHash(b"free"), [0]) is None
    assert pool.get_cached_block(BlockHash(b"held"), [0]) == [blocks[1]]
    again = pool.get_new_blocks(3)
    assert blocks[0] in again and blocks[0].block_hash is None
    pool._insert_block_hash(keys[0], blocks[0], num_tokens=16)
    assert pool.get_cached_block(BlockHash(b"free"), [0]) == [blocks[0]]


def _step() -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id="a",
            prompt_token_ids=[1],
            mm_features=[],
            sampling_params=SamplingParams(),
            pooling_params=None,
            block_ids=([2, 5],),
            num_computed_tokens=0,
            lora_request=None,
        )
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=["b", "c"],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, ([3],)],
        num_computed_tokens=[4, 4],
        num_output_tokens=[1, 1],
    )
    step.kv_cache_block_copies = [KVCacheBlockCopy(2, 3)]
    step.new_block_ids_to_zero = [4]
    return step


def test_every_block_id_of_a_step_is_translated() -> None:
    table = SlotTable(num_pages=16, slots_per_page=2)
    table.map(
        np.array([1, 2]), np.array([7, 4])
    )  # Logical blocks 2, 3 -> slots 14, 15; 4, 5 -> 8, 9.
    step = _step()
    physical = translate(step, table)
    assert physical.scheduled_new_reqs[0].block_ids == ([14, 9],)
    assert physical.scheduled_cached_reqs.new_block_ids == [None, ([15],)]
    assert physical.kv_cache_block_copies == [KVCacheBlockCopy(14, 15)]
    assert physical.new_block_ids_to_zero == [8]
    assert step.scheduled_new_reqs[0].block_ids == ([2, 5],), "the leader's step stays logical"
    named = {name for name in SchedulerOutput.__dataclass_fields__ if "block" in name}
    assert named <= {
        "kv_cache_block_copies",
        "new_block_ids_to_zero",
        "kv_connector_block_state",
        "num_common_prefix_blocks",  # A count.
    }, "vLLM has a new field with block ids: translate it"


def test_a_step_on_an_unleased_block_dies() -> None:
    table = SlotTable(num_pages=16, slots_per_page=2)
    table.map(np.array([1]), np.array([7]))
    table.unmap(np.array([1]))
    with pytest.raises(AssertionError, match="not leased"):
        translate(_step(), table)


def test_random_draws_depend_on_seed_and_position_alone() -> None:
    seeds = {position_seed(seed, position) for seed in range(50) for position in range(50)}
    assert len(seeds) == 2500
    generator = PositionGenerator(device="cpu")
    draws = []
    for _ in range(2):
        generator.manual_seed(position_seed(7, 3))
        draws.append(torch.empty(4).exponential_(generator=generator))
        generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(*draws)


def test_vllm_still_rewinds_generators_so_ours_must_accept_it() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()
    assert "set_offset" in inspect.getsource(CPUModelRunner._bookkeeping_sync)


def test_logits_come_of_what_stands_in_the_place_of_an_lm_head() -> None:
    """`BorrowedLmHead` has these two attributes alone, and gives the padding too."""
    rows = torch.randn(8, 4)

    def apply(_layer: object, x: torch.Tensor, bias: object = None) -> torch.Tensor:
        assert bias is None
        return x @ rows.t()

    lm_head = SimpleNamespace(tp_size=1, quant_method=SimpleNamespace(apply=apply))
    base = base_config()
    with set_current_vllm_config(base):
        processor = LogitsProcessor(5)
    assert processor.head_dtype == base.model_config.dtype, "another type reads the weight itself"
    hidden = torch.randn(3, 4, dtype=base.model_config.dtype)
    rows = rows.to(hidden.dtype)
    assert torch.equal(processor(lm_head, hidden), (hidden @ rows.t())[:, :5])


def test_the_share_of_a_vocabulary_follows_from_its_number() -> None:
    """`BorrowedUnit.layers` asks for the ranges of other parts."""
    ranges = [VocabParallelEmbedding._get_indices(448, 448, 440, 440, part, 4) for part in range(4)]
    found = [(each.org_vocab_start_index, each.num_org_elements) for each in ranges]
    assert found == [(0, 112), (112, 112), (224, 112), (336, 104)]


def test_wide_modes_capture_fewer_graphs() -> None:
    sizes = [1, 2, 4, *range(8, 257, 8)]
    kept = thinned(sizes)
    assert set(kept) < set(sizes) and kept[-1] == 256
    assert [size for size in kept if size <= 64] == [1, 2, 4, *range(8, 65, 8)]
    assert max(after / before for before, after in pairwise(kept) if before >= 64) <= 1.25
    assert thinned([1, 2, 4, 100]) == [1, 2, 4, 100]


def test_modes_that_borrow_capture_few_graphs() -> None:
    sizes = [1, 2, 4, *range(8, 257, 8)]
    assert sparse(sizes) == [1, 8, 32, 128, 256]
    assert sparse([1, 2, 4, 100]) == [1, 100]
    base = base_config()
    base.compilation_config.cudagraph_capture_sizes = sizes

    def captured(mode: Mode, width: int, *, borrows: bool) -> list[int]:
        config = mode_config(base, ModeKey(mode, width), borrows=borrows)
        return list(config.compilation_config.cudagraph_capture_sizes or [])

    assert captured(Mode.DP, 1, borrows=True) == sparse(sizes)
    assert captured(Mode.DP, 1, borrows=False) == sizes
    assert captured(Mode.TP, 2, borrows=False) == thinned(sizes)


@pytest.mark.parametrize(
    ("prompt", "prefill", "resuming"),
    [
        ([1], [1, 2, 3], {"a": [2, 3]}),
        ([1], [1, 2, 3], {}),
        ([1], None, {"a": [2, 3]}),
        ([1], None, {}),
        (None, [4], {"a": [4]}),
        (None, None, {}),
        ([1, 2], [1, 2], {"a": []}),
    ],
)
def test_a_step_plan_reaches_followers_whole(
    prompt: list[int] | None, prefill: list[int] | None, resuming: Mapping[str, list[int]]
) -> None:
    step = _step()
    new = step.scheduled_new_reqs[0]
    new.prompt_token_ids, new.prefill_token_ids = prompt, prefill
    plan = StepPlan(step, None, resuming)
    assert _travelled(plan) == plan
    assert (new.prompt_token_ids, new.prefill_token_ids) == (prompt, prefill)
    for whole in ([*(prompt or []), *resuming.get("a", [])], prompt or []):
        known = StepPlan(step, None, resuming, known={"a": np.array(whole, dtype=np.int32)})
        assert _travelled(known) == plan


def _travelled(plan: StepPlan) -> StepPlan:
    """What a follower's runner makes of it."""
    arrived: StepPlan = pickle.loads(pickle.dumps(plan))
    give_lists(arrived.output)
    arrived.resuming = {name: listed(ids) for name, ids in arrived.resuming.items()}
    return arrived


def test_an_asynchronous_result_says_when_its_tokens_are_there() -> None:
    source = inspect.getsource(AsyncOutput.__init__)
    assert "self.copy_event.record(copy_stream)" in source
    assert source.index("self.sampled_token_ids =") < source.index("self.copy_event.record")
    # The device's times of its step are attached to it, and are over when the tokens are there.
    assert "copy_stream.wait_stream(main_stream)" in source
    assert hasattr(AsyncOutput.__new__(AsyncOutput), "__dict__")
