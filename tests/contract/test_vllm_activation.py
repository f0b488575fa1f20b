"""What our silu kernel relies on in vLLM 0.32.0's activations; fails loudly when vLLM moves."""

import inspect

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.models import llama, qwen2


def test_a_gate_calls_the_method_that_we_replace() -> None:
    forward = inspect.getsource(CustomOp.forward)
    assert "return self._forward_method(*args, **kwargs)" in forward
    assert "forward" not in vars(SiluAndMul)
    with set_current_vllm_config(VllmConfig()):
        gate = SiluAndMul()
    gate._forward_method = lambda x: ("ours", x)
    assert gate(1) == ("ours", 1)


def test_on_cuda_this_method_is_the_one_that_launches_vllms_kernel() -> None:
    assert "return self.forward_cuda" in inspect.getsource(CustomOp.dispatch_forward)
    assert "self.op = torch.ops._C.silu_and_mul\n" in inspect.getsource(SiluAndMul.__init__)
    launch = inspect.getsource(SiluAndMul.forward_cuda)
    assert list(inspect.signature(SiluAndMul.forward_cuda).parameters) == ["self", "x"]
    assert "output_shape = x.shape[:-1] + (d,)" in launch
    assert "self.op(out, x)" in launch


def test_gates_are_of_the_class_that_we_look_for() -> None:
    assert op_registry["silu_and_mul"] is SiluAndMul
    assert "SiluAndMul" not in op_registry_oot
    for model in (llama.LlamaMLP, qwen2.Qwen2MLP):
        assert "self.act_fn = SiluAndMul()" in inspect.getsource(model.__init__)


def test_fused_quantization_is_found_by_the_class_and_else_the_gate_is_called() -> None:
    choose = inspect.getsource(fused_act_quant.maybe_fused_act_quant)
    assert "registry_key = (type(act_fn), key)" in choose
    assert "return act_fn(x)" in choose
    assert any(kind is SiluAndMul for kind, _ in fused_act_quant._FUSED_ACT_QUANT)
