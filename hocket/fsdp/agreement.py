"""Do the ranks that are to share parameters hold the same values?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.fsdp.members import Member
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard_groups import ShardGroups


class Fingerprints:
    """Sums of parameters, to be compared between ranks once all are known: so nobody waits for each one.

    Every rank would keep its part of a parameter and throw the rest away, so ranks with different values, say without a
    common seed, end up with a mixture that was nobody's; replicas would train different models without a word.
    """

    def __init__(self) -> None:
        self._found: list[tuple[ShardGroups, list[str], Tensor]] = []

    @torch.no_grad()
    def add(self, members: Sequence[Member], groups: ShardGroups, device: torch.device) -> None:
        """Note the parameters of a group, which all ranks of `groups` hold whole."""
        compared = [member for member in members if member.param.is_floating_point() and member.param.numel()]
        if compared:
            names = [member.name for member in compared]
            sums = torch.stack([_fingerprint(member.param) for member in compared])
            self._found.append((groups, names, sums.to(device)))

    def compare(self) -> None:
        """Raise ValueError for the first parameter whose values differ between ranks. All ranks call this."""
        spreads = []
        for groups, _, sums in self._found:
            both = torch.stack([sums, -sums])
            for group in (groups.reduce, groups.outer):
                group.all_reduce(both, "max").wait()
            spreads.append(both.sum(0))  # the largest minus the smallest
        spread = torch.cat(spreads).tolist() if spreads else []
        names = [name for _, found, _ in self._found for name in found]
        for name, difference in zip(names, spread, strict=True):
            if difference != 0:
                raise ValueError(
                    f"ranks hold different values of {name}, and each would keep a part of its own: give all ranks the "
                    f"same weights, as by torch.manual_seed(0) before the model is made, or by loading a checkpoint"
                )


def refuse_valueless(groups: Sequence[ParamGroup]) -> None:
    """Before the first forward, raise ValueError if parameters that get values late have none, or replicas other ones.

    All ranks call this.
    """
    for group in groups:
        name = group.members[0].name
        if group.valueless:
            raise ValueError(
                f"{name} was sharded on the meta device and has no values: call "
                f"model.to_empty(device={str(group.main.device)!r}) and give initial values, or load a state dict"
            )
        both = torch.stack([_fingerprint(group.main), -_fingerprint(group.main)]).to(group.device)
        group.groups.outer.all_reduce(both, "max").wait()
        if both.sum() != 0 and not group.groups.outer_shards:
            raise ValueError(f"replicas gave {name} different initial values: seed all ranks alike before that")


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(param: Tensor) -> Tensor:
    """The sum of a parameter's bits, read as integers: the same in whatever order it is made. int64, 0-d."""
    return param.detach().contiguous().view(_BITS[param.dtype.itemsize]).sum(dtype=torch.int64)


@torch.no_grad()
def take_first_rank(tensors: Sequence[Tensor], groups: ShardGroups, device: torch.device) -> None:
    """Give the tensors of all ranks of a placement the values of its first rank. All of these ranks call this."""
    for tensor in tensors:
        values = tensor.to(device, torch.uint8 if tensor.dtype == torch.bool else None, copy=True)
        if groups.reduce.rank or groups.outer.rank:
            values.zero_()
        for group in (groups.reduce, groups.outer):
            group.all_reduce(values, "sum").wait()
        tensor.copy_(values)
