"""vLLM's captures of CUDA graphs: they run without garbage collections, and thaw nothing."""

import gc
import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu import model_runner

from worker.engine.device import freeze_objects
from worker.engine.runners import captures


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = "freeze_gc_for_cudagraph_capture"
    monkeypatch.setattr(model_runner, own, freeze_gc_for_cudagraph_capture)
    freeze_objects()
    yield
    gc.unfreeze()


def test_vllm_thaws_what_was_frozen() -> None:
    """Else the adapter is not needed any more."""
    assert gc.get_freeze_count()
    with freeze_gc_for_cudagraph_capture():
        pass
    assert not gc.get_freeze_count()


def test_a_capture_takes_the_context_from_the_module_that_the_adapter_changes() -> None:
    source = inspect.getsource(model_runner.GPUModelRunner.capture_model)
    assert "with freeze_gc_for_cudagraph_capture():" in source
    captures.keep_frozen()
    assert model_runner.freeze_gc_for_cudagraph_capture is captures.collector_off


@pytest.mark.parametrize("was_on", [True, False])
def test_a_capture_collects_no_garbage_and_thaws_nothing(was_on: bool) -> None:
    before = gc.get_freeze_count()
    if not was_on:
        gc.disable()
    try:
        with captures.collector_off():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
    assert gc.get_freeze_count() > before // 2 > 0, "some have ended meanwhile"
