"""The queues of a device, which sharded models share."""

from __future__ import annotations

import torch

from hocket.runtime.queue import Queue

_queues: dict[tuple[str, torch.device], Queue] = {}


def queue_of(name: str, device: torch.device) -> Queue:
    """The queue of that name on a device.

    Note: [Models share queues]
    Models over the same ranks share groups, and a backward may run through several of them. A group has one place for
    what a reduction receives, until it is added up: so the reductions of a group are all on one queue.
    """
    if (name, device) not in _queues:
        _queues[name, device] = Queue(name, device)
    return _queues[name, device]
