"""DeepSpeed ZeRO-3: weights, gradients and optimizer state are sharded.

Each layer and the head are leaf modules, so that ZeRO-3 fetches each as one, with hooks around it and none inside. (The
embedding cannot be one: its input has no gradient, and then the library reduces its weight's before it is there.) The
buckets hold one layer: that much is fetched ahead, and that much is reduced at once. The library's defaults fetch a
quarter of a large layer ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import PlainModel, adamw, first_value, materialize, optimizer_name, plain_model
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch
from hocket.model.layers import DenseLayer
from hocket.model.moe import MoELayer
from hocket.model.transformer import Head


def deepspeed(workload: Workload, rank: int, device: torch.device) -> Contender:
    """ZeRO-3 with buckets as large as a layer."""
    return DeepSpeed(workload, rank, device)


def options(model: PlainModel, workload: Workload) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    train, dtype = workload.config.train, workload.config.precision.compute
    layer = max(sum(param.numel() for param in layer.parameters()) for layer in model.layers.values())
    zero = dict(
        stage=3,
        overlap_comm=True,
        contiguous_gradients=True,
        reduce_bucket_size=layer,
        stage3_prefetch_bucket_size=layer,
        stage3_max_live_parameters=max(10**9, 4 * layer),
        memory_efficient_linear=False,  # saves memory by calling other functions
    )
    return {
        "train_micro_batch_size_per_gpu": train.sequences,
        "gradient_accumulation_steps": train.microbatches,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "communication_data_type": dtype,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class DeepSpeed:
    """Plain steps over a model in a DeepSpeed engine."""

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        if workload.mesh.ep > 1:
            raise ValueError(
                f"against = deepspeed (command line): this model's experts cannot be on several ranks, and mesh.ep = "
                f"{workload.mesh.ep}; fix: mesh.ep = 1, or leave it out"
            )
        from deepspeed import initialize  # pyrefly: ignore[missing-import]  # optional: only its users need it
        from deepspeed.utils import safe_set_full_fp32_param, set_z3_leaf_modules  # pyrefly: ignore[missing-import]

        self.update = workload.optimizer
        model = plain_model(workload, rank)
        materialize(model, workload, rank, device)
        config = options(model, workload)
        units = {type(module) for module in model.modules()}
        set_z3_leaf_modules(model, [unit for unit in (DenseLayer, MoELayer, Head) if unit in units])
        shapes = {name: param.shape for name, param in model.named_parameters()}
        optimizer = adamw(model.parameters(), [param.dim() for param in model.parameters()], workload)
        self.engine: Any = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
        for name, param in self.engine.module.named_parameters():
            safe_set_full_fp32_param(param, first_value(name, shapes[name], workload, rank, device))
        if not self.update:
            self.engine.set_gradient_accumulation_boundary(False)
        zero = ", ".join(f"{name} = {value}" for name, value in config["zero_optimization"].items())
        self.settings: Mapping[str, str] = {
            "zero_optimization": zero,
            "leaf modules": "each layer, head",
            "reduce": f"{workload.config.precision.compute}, after every microbatch, summed in fp32",
            "optimizer": optimizer_name(workload, "on fp32 partitions"),
            "compile": "each layer" if workload.compile else "off",
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        for microbatch in microbatches:
            loss = self.engine(microbatch.ids, microbatch.targets)
            self.engine.backward(loss)  # divides by the number of microbatches
            self.engine.step()  # updates after the last one
            losses.append(loss.detach())
        if not self.update:
            self.engine.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def close(self) -> None:
        self.engine.destroy()
        del self.engine
