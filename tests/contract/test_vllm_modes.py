"""What sp steps and experts rely on in vLLM 0.32.0's private parts; fails when vLLM moves."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")

from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.fused_moe import layer  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.runner import moe_runner  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.utils import (  # noqa: E402
    is_weights_pre_processed,
    weights_already_processed,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from worker.engine.weights.moe import RankedExperts  # noqa: E402


def gpu_source(name: str) -> str:
    """Source of a module of model runner V2, which cannot be imported without a GPU."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("v1").joinpath("worker", "gpu", name).read_text()


def test_runner_v1_takes_its_model_from_an_attribute_at_each_step() -> None:
    assert "self.model(" in inspect.getsource(GPUModelRunner._model_forward)
    assert "self.model.compute_logits" in inspect.getsource(GPUModelRunner.execute_model)
    dummy = inspect.signature(GPUModelRunner._dummy_run).parameters
    assert {"uniform_decode", "randomize_inputs"} <= dummy.keys()


def test_runner_v2_takes_model_and_graphs_from_attributes_at_each_step() -> None:
    source = gpu_source("model_runner.py")
    step = source[source.index("def execute_model") : source.index("def shutdown")]
    assert "model_output = self.model(**model_inputs)" in step
    assert "self.cudagraph_manager.run_fullgraph(batch_desc)" in step
    assert "dispatch_cg_and_sync_dp(\n            self.cudagraph_manager," in step
    capture = source[source.index("def capture_model") :]
    assert "self.cudagraph_manager.capture(\n                        self.model," in capture
    dummy = source[source.index("def _dummy_run") :][:600]
    assert "uniform_decode: bool" in dummy
    assert "randomize_inputs: bool" in dummy


def test_graphs_take_their_sizes_from_the_configuration_they_are_given() -> None:
    source = gpu_source("cudagraph_utils.py")
    candidates = source[source.index("def _init_candidates") :][:600]
    assert "self.compilation_config.cudagraph_capture_sizes" in candidates
    manager = source[source.index("class ModelCudaGraphManager") :][:600]
    for name in ("vllm_config", "device", "cudagraph_mode", "decode_query_len"):
        assert f"        {name}:" in manager, name


def test_layers_with_experts_are_looked_up_by_their_name() -> None:
    assert "no_compile_layers[layer_name]" in inspect.getsource(moe_runner.get_layer_from_name)
    encode = inspect.getsource(moe_runner.MoERunner._encode_layer_name)
    assert "self.layer_name" in encode
    assert "all_moe_layers is not None" in encode, "fast_moe_cold_start is what we turn off"


def test_the_map_of_experts_is_made_by_a_name_that_we_replace() -> None:
    assert "expert_map_manager = ExpertMapManager(" in inspect.getsource(layer.FusedMoEFactory)
    assert isinstance(layer.ExpertMapManager, type)


def test_experts_are_plugged_in_and_keep_the_order_that_they_were_processed_into() -> None:
    assert op_registry_oot["RoutedExperts"] is RankedExperts
    assert "_expert_map" in inspect.getsource(RoutedExperts.update_expert_map_info)
    with weights_already_processed():
        assert is_weights_pre_processed()
    process = inspect.getsource(UnquantizedFusedMoEMethod.process_weights_after_loading)
    early = process[process.index("is_weights_pre_processed()") :][:250]
    assert "self._init_moe_kernel(layer)" in early
    assert "return" in early
