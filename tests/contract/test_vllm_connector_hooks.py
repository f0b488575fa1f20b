"""What vLLM's scheduler uses of a KV connector, `BlockConnector` has (vLLM 0.32.0)."""

import ast
import inspect

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.sched import async_scheduler, scheduler

from worker.engine.scheduling.connector import BlockConnector

NOT_CALLED = {
    # At construction, before the connector is set.
    "bind_kv_cache_manager",
    # Of connectors that keep the blocks of several kinds of layers.
    "request_finished_all_groups",
}


def used_names() -> set[str]:
    """Attributes of `self.connector`, and of the local name `connector`."""
    found = set()
    for module in (scheduler, async_scheduler):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
                "self.connector",
                "connector",
            ):
                found.add(node.attr)
    return found


def test_it_has_all_that_the_scheduler_uses() -> None:
    used = used_names()
    assert {"get_num_new_matched_tokens", "update_state_after_alloc"} <= used
    missing = {name for name in used - NOT_CALLED if not hasattr(BlockConnector, name)}
    assert not missing
    assert not issubclass(BlockConnector, SupportsHMA)


def test_its_hooks_take_what_connectors_take() -> None:
    for name in used_names() - NOT_CALLED:
        theirs = getattr(KVConnectorBase_V1, name)
        if not inspect.isfunction(theirs):
            continue
        parameters = list(inspect.signature(getattr(BlockConnector, name)).parameters)
        if "_" not in parameters:
            assert parameters == list(inspect.signature(theirs).parameters), name
