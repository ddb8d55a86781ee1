"""What a rank holds of parameters and gradients, to compare with a model that is not sharded."""

from typing import Any

from torch import Tensor


def here(shard: Any, whole: Tensor) -> Tensor:
    """This rank's elements of a whole tensor like the parameter `shard`, 1-D."""
    return shard.group.spans[shard.position].of(whole.detach())


def local(tensor: Any) -> Tensor:
    """The elements of a DTensor on this rank, or all of another tensor, 1-D."""
    return getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
