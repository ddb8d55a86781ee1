"""megatron-core 0.19.2 over hocket's layers: its pipeline schedules, its buckets, its sharded optimizer.

megatron-core's own layers need Transformer Engine to be fast: without it, attention writes out its S x S scores and
experts run one after the other. So this contender hands hocket's layers to megatron-core and compares what runs them:
`get_forward_backward_func` (no pipeline, 1F1B, interleaved 1F1B), `DistributedDataParallel` with bucketed
reduce-scatters under backward and all-gathers under forward, `DistributedOptimizer` (each rank keeps whole weights and
gradients in the compute dtype, and a share of the fp32 main weights and optimizer state), and for experts on other
ranks its combined forward and backward of two microbatches (`megatron_core_plan.py`).

Activations travel between pipeline ranks as [B, S, D]: megatron-core calls the first two extents sequence and
microbatch, and never looks at what they mean.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state  # pyrefly: ignore[missing-import]
from megatron.core.distributed import (  # pyrefly: ignore[missing-import]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # pyrefly: ignore[missing-import]
from megatron.core.pipeline_parallel import get_forward_backward_func  # pyrefly: ignore[missing-import]
from megatron.core.transformer import TransformerConfig  # pyrefly: ignore[missing-import]
from torch import Tensor

from benchmarks.bench.contender import Contender
from benchmarks.bench.peers.megatron_core_plan import Experts, Stage, wait_for_whole_layers
from benchmarks.bench.plain import Exchange, PlainModel, first_value, materialize, plain_model
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch
from hocket.program.stages import layout_of


@dataclass(frozen=True)
class Options:
    """How megatron-core is used."""

    overlap_experts: bool = True
    """Run the forward of one microbatch under the backward of another, where megatron-core can."""
    fp32: bool = False
    """Gradients are reduced in fp32, megatron-core's choice for bf16 models."""


def megatron_core(workload: Workload, rank: int, device: torch.device) -> Contender:
    return MegatronCore(workload, rank, device, Options())


def megatron_core_fp32(workload: Workload, rank: int, device: torch.device) -> Contender:
    return MegatronCore(workload, rank, device, Options(fp32=True))


def megatron_core_sync(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Experts are reached by synchronous all-to-alls."""
    return MegatronCore(workload, rank, device, Options(overlap_experts=False))


def join_groups(workload: Workload) -> None:
    """Make megatron-core's process groups; its default order of ranks is hocket's: pp outermost, ep inside dp.

    They are global to the process: contenders of one mesh share them, another mesh replaces them.
    """
    mesh, chunks = workload.mesh, workload.chunks
    wanted = (mesh.pp, chunks if chunks > 1 else None, mesh.ep)
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if found == wanted:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=wanted[1],
        expert_model_parallel_size=mesh.ep,
        create_gloo_process_groups=False,
    )


def overlaps(workload: Workload, options: Options) -> bool:
    """Whether the forward and backward of two microbatches are combined: megatron-core's conditions for it."""
    mesh = workload.mesh
    possible = mesh.ep > 1 and workload.dtype is torch.bfloat16 and (mesh.pp == 1 or workload.chunks > 1)
    return options.overlap_experts and possible


class MegatronCore:
    """Steps under megatron-core's schedules."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, options: Options) -> None:
        check(workload)
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        join_groups(workload)
        self.workload, self.device, self.options = workload, device, options
        self.overlap = overlaps(workload, options)
        self.delayed = self.overlap and not workload.compile
        self.config = self._config()
        self.ddp_config = self._ddp_config()
        self.chunks = self._chunks(rank)
        self.optimizer = self._optimizer(rank) if workload.optimizer else None
        self._connect()
        self.run = get_forward_backward_func()
        self.settings = self._settings()

    def _config(self) -> Any:
        mesh, c, dtype = self.workload.mesh, self.workload.config, self.workload.dtype
        chunks = self.workload.chunks
        interleaved = chunks > 1
        return TransformerConfig(
            num_layers=mesh.pp * chunks,  # only checked to be divisible; hocket's layout says which layers
            hidden_size=c.model.hidden,
            num_attention_heads=c.model.heads,
            num_moe_experts=c.model.experts or None,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            pipeline_model_parallel_size=mesh.pp,
            virtual_pipeline_model_parallel_size=chunks if interleaved else None,
            expert_model_parallel_size=mesh.ep,
            moe_token_dispatcher_type="alltoall",
            overlap_p2p_comm=interleaved,
            batch_p2p_comm=not interleaved,
            deallocate_pipeline_outputs=True,
            microbatch_group_size_per_vp_stage=(c.plan.group or mesh.pp) if interleaved else None,
            overlap_moe_expert_parallel_comm=self.overlap,
            delay_wgrad_compute=self.delayed,
            add_bias_linear=False,
        )

    def _ddp_config(self) -> Any:
        fp32 = self.options.fp32
        # Several microbatches would lose bits in a bf16 sum; with one there is nothing to sum.
        local_fp32 = not fp32 and self.workload.dtype != torch.float32 and self.workload.config.train.microbatches > 1
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=fp32,
            param_name_patterns_for_fp32_local_accumulation=("all",) if local_fp32 else (),
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            average_in_collective=True,
            delay_wgrad_compute=self.delayed,
        )

    def _chunks(self, rank: int) -> list[Any]:
        """The virtual stages of this rank, with first values, each under megatron-core's DDP."""
        workload, made = self.workload, []
        mesh, where = workload.mesh, workload.mesh.coordinates(rank)
        rows = Exchange(parallel_state.get_expert_model_parallel_group(), mesh.ep, where.ep)
        # Counts have a communicator of their own, as in megatron-core's dispatcher: they must not queue behind rows.
        counts = Exchange(parallel_state.get_expert_tensor_and_model_parallel_group(), mesh.ep, where.ep)
        for number in range(workload.chunks):
            model = plain_stage(workload, rank, number, rows)
            materialize(model, workload, rank, self.device)
            for name, param in model.named_parameters():
                param.allreduce = not (".experts." in name and mesh.ep > 1)  # pyrefly: ignore[missing-attribute]
            stage = Stage(self.config, model, number, Experts(rows, counts) if self.overlap else None)
            if self.delayed:
                stage.announce_late_gradients()
            chunk = DistributedDataParallel(self.config, self.ddp_config, stage, disable_bucketing=number > 0)
            wait_for_whole_layers(chunk, stage, compiled=workload.compile)
            if self.delayed:
                stage.manage_weights()
            made.append(chunk)
        return made

    def _optimizer(self, rank: int) -> Any:
        t = self.workload.config.train
        config = OptimizerConfig(
            optimizer="adam",
            lr=t.lr,
            weight_decay=t.weight_decay,
            adam_beta1=t.betas[0],
            adam_beta2=t.betas[1],
            adam_eps=t.eps,
            clip_grad=0.0,
            bf16=self.workload.dtype is torch.bfloat16,
            params_dtype=self.workload.dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        for group in optimizer.param_groups:  # else done by megatron-core's learning rate scheduler
            group["weight_decay"] = t.weight_decay * group["wd_mult"]
        self._fill_main(optimizer, rank)
        return optimizer

    @torch.no_grad()
    def _fill_main(self, optimizer: Any, rank: int) -> None:
        """Main weights begin with the fp32 first values, not with their bf16 roundings."""
        parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
        owners = {param: part for part in parts for group in part.model_float16_groups for param in group}
        for chunk in self.chunks:
            for name, param in chunk.module.model.named_parameters():
                if param in owners:
                    value = first_value(name, param.shape, self.workload, rank, self.device)
                    mine = owners[param]._get_model_param_range_map(param)["param"]
                    param.main_param.copy_(value.view(-1)[mine.start : mine.end])

    def _connect(self) -> None:
        """What megatron-core's training loop puts into the configuration before the first step."""
        self.config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        self.config.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]
        if len(self.chunks) == 1:
            self.config.no_sync_func = self.config.no_sync_func[0]
            self.config.grad_sync_func = self.config.grad_sync_func[0]
        self.config.finalize_model_grads_func = finalize_model_grads

    def _settings(self) -> dict[str, str]:
        w, mesh, c = self.workload, self.workload.mesh, self.workload.config
        wire = "fp32" if self.options.fp32 else c.precision.compute
        sums = "fp32" if self.ddp_config.param_name_patterns_for_fp32_local_accumulation else wire
        schedule = (
            "none" if mesh.pp == 1 else ("1F1B" if len(self.chunks) == 1 else f"interleaved 1F1B x {len(self.chunks)}")
        )
        found = {
            "model": "hocket's layers and kernels, no Transformer Engine",
            "pipeline": schedule + (", overlap_p2p_comm" if self.config.overlap_p2p_comm else ""),
            "gradients": f"reduce-scatter in {wire}, summed over microbatches in {sums}, once a step",
            "ddp": "overlap_grad_reduce, overlap_param_gather, average_in_collective, buckets of "
            f"{self.ddp_config.bucket_size} parameters (first chunk of the first pipeline rank; else one bucket)",
            "optimizer": "DistributedOptimizer, AdamW of torch on fp32 shards"
            if w.optimizer
            else "none; weights are gathered",
            "compile": "off" if not w.compile else ("each part of a layer" if self.overlap else "each layer"),
        }
        if mesh.ep > 1:
            delayed = "with" if self.delayed else "without"
            found["experts"] = (
                f"overlap_moe_expert_parallel_comm (combined 1F1B), {delayed} delay_wgrad_compute; "
                "hocket's routing, permutation and grouped GEMM, NCCL all-to-all, counts read late by the host"
                if self.overlap
                else "synchronous all-to-all" + self._why_synchronous()
            )
        return found

    def _why_synchronous(self) -> str:
        if not self.options.overlap_experts:
            return ""
        return ": combined 1F1B needs bf16, and with a pipeline also several chunks per rank (plan.chunks)"

    def _forward(self, data: Iterator[Microbatch], stage: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        microbatch = next(data)
        if return_schedule_plan:
            return stage.build_schedule_plan(microbatch), loss_and_copy
        return stage(microbatch), loss_and_copy

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        losses: list[Tensor] = self.run(
            forward_step_func=self._forward,
            data_iterator=[iter(microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=self.workload.config.train.sequences,
            micro_batch_size=self.workload.config.data.sequence_length,
        )
        if self.optimizer is not None:
            self.optimizer.step()
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)

    def close(self) -> None:
        """Let go of memory. megatron-core's groups are the process's, and other contenders may use them."""
        self.config.no_sync_func = self.config.grad_sync_func = None
        del self.chunks, self.optimizer


def plain_stage(workload: Workload, rank: int, number: int, rows: Exchange) -> PlainModel:
    """A virtual stage of this rank on the meta device, with the layers that hocket's layout gives it."""
    if workload.mesh.pp == 1:
        return plain_model(workload, rank, exchange=rows)
    layout, pp = layout_of(workload.config), workload.mesh.coordinates(rank).pp
    first, last = layout.is_first(pp, number), layout.is_last(pp, number)
    return plain_model(workload, rank, layers=layout.layers(pp, number), first=first, last=last, exchange=rows)


def loss_and_copy(loss: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, which megatron-core divides in place by the number of microbatches, and what is reported of it."""
    return loss.clone(), loss.detach().clone()


def check(workload: Workload) -> None:
    """Raise ValueError for what megatron-core's schedules do not take."""
    mesh, c = workload.mesh, workload.config
    prefix = "against = megatron_core (command line): "
    interleaved = workload.chunks > 1
    group = c.plan.group or mesh.pp
    left = c.train.microbatches % group
    if interleaved and (c.train.microbatches < group or 0 < left < mesh.pp):
        raise ValueError(
            f"{prefix}its interleaved schedule needs microbatches in groups of {group}, and train.microbatches = "
            f"{c.train.microbatches}; fix: train.microbatches = {group * max(1, c.train.microbatches // group)}"
        )
