"""Connects the stages of the pipeline groups that a rank prepares."""

from collections.abc import Callable
from functools import partial

import torch

from comm_pool.cpu.stage_link import StageLink, link_bytes
from comm_pool.pool import Communicator, CommunicatorPool
from worker.engine.runners.stage_link import device_link_bytes, make_device_link
from worker.spec import RankSpec


def connect_pipelines(
    communicators: CommunicatorPool, spec: RankSpec, device: torch.device
) -> None:
    """Give each pipeline group its links, over memory that its ranks share."""
    for staged in spec.pipelines:
        if spec.memory is not None:
            size = link_bytes()
            communicators.connect_stages(staged, spec.memory, size, StageLink, links_tokens=False)
        else:
            assert spec.links is not None
            size, make = device_link_bytes(), partial(make_device_link, device)
            communicators.connect_stages(staged, spec.links, size, make, links_tokens=True)


def launched(device: torch.device, selected: Communicator | None) -> Callable[[], bool]:
    """Return a query for whether a device has done all that was launched until now; any thread.

    With that between the stages of the selected group: what is sent to a lost stage holds the
    stream of its link alone.
    """
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    links = selected.links if selected is not None else None
    is_sent = links.done() if links is not None else lambda: True
    return lambda: bool(event.query()) and is_sent()
