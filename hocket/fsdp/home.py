"""Where shards lie while nobody computes with them: on the device, or in the host's memory.

Note: [Shards in the host's memory]
With `ShardOptions(offload=...)` a rank keeps weights, gradients and the optimizer's state of its shards on the host,
and the optimizer runs there. Copies go both ways beside compute: they are work of the queues that gather and reduce.

    main  --cast, once a step, by the host-->  weight  --copy-->  gathered weights      ahead of the gather
    main_grad  <--copy--  what was reduced                                              behind the reduction

Weights that are not sharded are copied so, too, and "gathered" from one rank. With two levels of shards, what the outer
one gathers and adds up (`weight` and `partial`) stays on the device, and crosses once a step.

The host goes on while copies run, and there are two things that it must not do meanwhile. It must not change what is
still being copied out: so that is `weight`, which only `refresh` writes, and `main` may change at any time. And it must
not read what has not arrived: so who reads gradients waits for their copies (`wait_in`). A gradient
that is added to one of an earlier microbatch meets it on the device, where that is copied first, so that no host waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hocket.runtime.queue import Passed
from hocket.runtime.transports import Pending

Offload = Literal["none", "pinned", "pageable"]
CPU = torch.device("cpu")


class Home:
    """Memory for what a rank keeps of a group, and the copies between it and the device that computes."""

    def __init__(self, device: torch.device, offload: Offload = "none") -> None:
        self.device = device
        self.away = offload != "none"
        """Whether it is the host's memory, also of a device that is the host."""
        self._where = CPU if self.away else device
        self._pinned = offload == "pinned"
        self._crosses = self.away and device.type == "cuda"
        self._out, self._in = (Passed(device if self._crosses else CPU) for _ in range(2))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, with arbitrary content."""
        return torch.empty(numel, dtype=dtype, device=self._where, pin_memory=self._pinned)

    def zeros(self, numel: int, dtype: torch.dtype, on_device: bool = False) -> Tensor:
        """1-D; `on_device` even if this home is the host's memory."""
        if on_device:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return self.empty(numel, dtype).zero_()

    def copy_out(self, kept: Tensor, into: Tensor) -> None:
        """Copy to the device, on the current stream."""
        into.copy_(kept, non_blocking=self._crosses)
        self._out.note()

    def on_device(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy on the device in another dtype, made on the current stream; `kept` may change at once."""
        if not self.away:
            return kept.to(dtype)
        cast = self.empty(kept.numel(), dtype).copy_(kept)  # pinned memory goes only when it has been read
        into = torch.empty_like(cast, device=self.device, pin_memory=False)
        self.copy_out(cast, into)
        return into

    def wait_out(self) -> None:
        """Have the host wait until what it has copied out has been read."""
        self._out.wait()

    def wait_in(self) -> None:
        """Have the host wait until what was copied in is here."""
        self._in.wait()

    def reduced(self, kept: Tensor, add: bool, reduce: Callable[[Tensor, bool], Pending]) -> Pending:
        """Have `reduce(into, add)` write to `kept`, or add to it: by way of the device, if it lies elsewhere."""
        if not self.away:
            return reduce(kept, add)
        into = torch.empty_like(kept, device=self.device, pin_memory=False)
        if add:
            into.copy_(kept, non_blocking=self._crosses)

        def bring() -> None:
            kept.copy_(into, non_blocking=self._crosses)
            self._in.note()

        return reduce(into, add).then(bring)
