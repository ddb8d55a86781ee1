"""Companions of `hocket.fully_shard`. With FSDP2's policies, one import has everything a training loop needs."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle, share_comm_ctx
from torch.optim import Muon  # takes shards once a model is sharded

from hocket.fsdp.api import context_of, fully_shard, instead_of_fsdp2, step_and_gather, unit_of
from hocket.fsdp.fsdp2 import FSDPModule, register_fsdp_forward_method
from hocket.fsdp.shard_groups import Placement

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "Placement",
    "UnshardHandle",
    "context_of",
    "fully_shard",
    "instead_of_fsdp2",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "step_and_gather",
    "unit_of",
]
