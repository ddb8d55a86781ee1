"""transformers' Qwen3-MoE under torch FSDP2: the usual choice of users of that model.

Each layer is a unit, and weights of the next two are fetched ahead. Experts are sharded over all ranks like everything
else, for transformers' own expert parallelism excludes FSDP; their products are transformers' grouped ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.bench.any_model import buffer_of, model_of, value_of
from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import adamw, optimizer_name
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch


class Fsdp2:
    """The model under torch's `fully_shard`: each layer a unit, weights of the next two fetched ahead."""

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        self.workload = workload
        model: Any = model_of(workload)
        mesh = init_device_mesh(device.type, (workload.mesh.dp,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=workload.dtype)
        layers = list(model.model.layers)
        for layer in layers:
            if workload.compile:
                layer.self_attn.compile(fullgraph=True)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for n, layer in enumerate(layers):
            assert isinstance(layer, FSDPModule)
            layer.set_modules_to_forward_prefetch(layers[n + 1 : n + 3])
            layer.set_modules_to_backward_prefetch(layers[max(0, n - 2) : n][::-1])
        buffers = {name: buffer_of(model, name, device) for name, _ in model.named_buffers()}
        model.to_empty(device=device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                value = value_of(name, param.shape, workload, device)
                assert isinstance(param, DTensor)
                part = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().copy_(part.to_local())
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        self.model = model
        params = list(model.parameters())
        self.optimizer = adamw(params, [p.dim() for p in params], workload) if workload.optimizer else None
        self.settings: dict[str, str] = {
            "model": f"transformers' {type(model).__name__}, unmodified",
            "experts": "sharded over all ranks, gathered layer by layer; grouped products",
            "prefetch": "2 layers ahead, explicit, in forward and backward",
            "reduce": f"{workload.config.precision.compute}, after every microbatch",
            "optimizer": optimizer_name(workload, "on fp32 shards"),
            "compile": "attention of each layer" if workload.compile else "off",
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        for microbatch in microbatches:
            logits = self.model(input_ids=microbatch.ids, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), microbatch.targets.flatten())
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizer


def fsdp2(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The contender."""
    return Fsdp2(workload, rank, device)
