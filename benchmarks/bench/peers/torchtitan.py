"""torchtitan 0.2.2 over hocket's layers: its FSDP2 wiring, its expert dispatcher, its pipelines.

torchtitan's functions take any model whose modules have the names of its own: `tok_embeddings`, `layers`, `norm`,
`output`, and in a MoE layer `moe.experts`. hocket's layers are given these names, so what is compared is what runs
them: `apply_fsdp` (one unit per layer, the last unit stays gathered after forward, explicit prefetch with experts on
other ranks), `ExpertParallel` around the experts, and `build_pipeline_schedule`, with DualPipeV and its threads that
run the forward of one microbatch beside the backward of another. torchtitan never divides gradients: the loss carries
the factor 1 / (microbatches * data-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig  # pyrefly: ignore[missing-import]
from torchtitan.distributed import ParallelDims  # pyrefly: ignore[missing-import]
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule  # pyrefly: ignore[missing-import]
from torchtitan.models.llama4.infra.parallelize import apply_fsdp  # pyrefly: ignore[missing-import]

from benchmarks.bench.contender import Contender
from benchmarks.bench.peers.pipelining import HeldStage
from benchmarks.bench.peers.torchtitan_model import TitanModel, move_experts, titan_model
from benchmarks.bench.plain import adamw, first_value, optimizer_name
from benchmarks.bench.workload import Workload
from hocket.layers.linears import cross_entropy
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.program.ops import even_bounds


@dataclass(frozen=True)
class Options:
    """How torchtitan is used."""

    fp32: bool = False
    """Gradients are reduced in fp32, torchtitan's default."""
    own_dispatcher: bool = False
    """Rows are put into the experts' order by torchtitan's padded indexing instead of hocket's gathers."""


def torchtitan(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Torchtitan(workload, rank, device, Options())


def torchtitan_fp32(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Torchtitan(workload, rank, device, Options(fp32=True))


def torchtitan_dispatcher(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Torchtitan(workload, rank, device, Options(own_dispatcher=True))


@lru_cache(maxsize=4)
def dims_of(mesh: Mesh) -> Any:
    """The meshes of torchtitan, made once per process; its order of ranks is hocket's: pp outermost, ep inside dp."""
    dims = ParallelDims(
        dp_replicate=1, dp_shard=mesh.dp, cp=1, tp=1, pp=mesh.pp, ep=mesh.ep, etp=1, world_size=mesh.world
    )
    dims.build_mesh()
    return dims


def schedule_of(workload: Workload) -> str:
    """The best of torchtitan's pipeline schedules that a rank's number of chunks allows; empty without a pipeline."""
    mesh, chunks, microbatches = workload.mesh, workload.chunks, workload.config.train.microbatches
    if mesh.pp == 1:
        return ""
    if chunks == 1:
        return "1F1B"
    overlapped = chunks == 2 and mesh.ep > 1 and microbatches >= 2 * mesh.pp
    return "DualPipeV" if overlapped else "Interleaved1F1B"


class Torchtitan:
    """Steps under torchtitan's parallelisms."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, options: Options) -> None:
        check(workload)
        self.workload, self.device, self.options = workload, device, options
        self.mesh, self.where = workload.mesh, workload.mesh.coordinates(rank)
        self.dims, self.schedule_name = dims_of(workload.mesh), schedule_of(workload)
        self.overlap = self.schedule_name == "DualPipeV"
        self.numbers = self._stages()
        self.bounds = even_bounds(workload.config.model.layers, self._stage_count())
        if workload.config.plan.split and self.mesh.pp > 1:
            self.bounds = (0, *accumulate(workload.config.plan.split))
        self.models = [self._model(number) for number in self.numbers]
        for model in self.models:
            model.to_empty(device=device)
            fill(model, workload, rank, device)
        params = [param for model in self.models for param in model.parameters()]
        self.optimizer = adamw(params, [param.dim() for param in params], workload) if workload.optimizer else None
        self.schedule = self._schedule() if self.schedule_name else None
        self.settings = self._settings()

    def _stage_count(self) -> int:
        return self.mesh.pp * self.workload.chunks

    def _stages(self) -> list[int]:
        """The virtual stages of this rank: in a loop, or there and back in a V."""
        pp, rank = self.mesh.pp, self.where.pp
        if self.overlap:
            return [rank, 2 * pp - 1 - rank]
        return [chunk * pp + rank for chunk in range(self.workload.chunks)]

    def _model(self, number: int) -> TitanModel:
        """One virtual stage on the meta device, in torchtitan's hands."""
        w = self.workload
        layers = range(self.bounds[number], self.bounds[number + 1])
        first, last = number == 0, number == self._stage_count() - 1
        compiled = w.compile and not self.overlap
        model = titan_model(w, layers, first, last, compiled=compiled)
        if self.mesh.ep > 1:
            move_experts(model, self.dims.get_mesh("ep"), overlap=self.overlap, own=self.options.own_dispatcher)
        apply_fsdp(
            model,
            self.dims.get_mesh(["fsdp"]),
            param_dtype=w.dtype,
            reduce_dtype=torch.float32 if self.options.fp32 else w.dtype,
            pp_enabled=self.mesh.pp > 1,
            ep_degree=self.mesh.ep,
            edp_mesh=self.dims.get_optional_mesh(["efsdp"]),
        )
        if not self.options.fp32:
            # torchtitan sets the divisor 1, for which NCCL multiplies while it sums, and in bf16 that comes out wrong
            # (torch 2.11: losses stand still). The same sum without the factor is right.
            for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
                module.set_force_sum_reduction_for_comms(True)
        return model

    def _schedule(self) -> Any:
        c = self.workload.config
        job = JobConfig()
        job.parallelism.pipeline_parallel_schedule = self.schedule_name
        job.parallelism.pipeline_parallel_degree = self.mesh.pp
        job.parallelism.pipeline_parallel_microbatch_size = c.train.sequences
        job.parallelism.pipeline_parallel_expert_parallel_overlap = self.overlap
        job.training.local_batch_size = c.train.sequences * c.train.microbatches
        stages = [self._stage(number, model) for number, model in zip(self.numbers, self.models, strict=True)]
        return build_pipeline_schedule(job, stages, self._loss)

    def _stage(self, number: int, model: TitanModel) -> HeldStage:
        """Shapes are told: torchtitan would run the model once to find them."""
        c = self.workload.config
        shape = (c.train.sequences, c.data.sequence_length)
        hidden = torch.empty(*shape, c.model.hidden, dtype=self.workload.dtype, device="meta")
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        logits = torch.empty(*shape, c.model.vocab, dtype=self.workload.dtype, device="meta")
        return HeldStage(
            model,
            number,
            self._stage_count(),
            self.device,
            input_args=hidden if number else ids,
            output_args=hidden if model.output is None else logits,
            group=self.dims.get_mesh("pp").get_group(),
        )

    @property
    def _factor(self) -> float:
        """What turns a mean over a microbatch into a share of the mean over the step."""
        return 1.0 / (self.mesh.dp * self.workload.config.train.microbatches)

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten()) * self._factor

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses: list[Tensor] = []
        if self.schedule is None:
            for microbatch in microbatches:
                loss = self._loss(self.models[0](microbatch.ids), microbatch.targets)
                loss.backward()
                losses.append(loss.detach())
        else:
            last = self._stage_count() - 1 in self.numbers
            ids = (torch.cat([microbatch.ids for microbatch in microbatches]),) if 0 in self.numbers else ()
            targets = torch.cat([microbatch.targets for microbatch in microbatches]) if last else None
            self.schedule.step(*ids, target=targets, losses=losses if last else None, return_outputs=False)
        if self.optimizer is not None:
            self.optimizer.step()
        for model in self.models:
            model.zero_grad(set_to_none=True)
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        return total * self.mesh.dp

    def _settings(self) -> dict[str, str]:
        w, c = self.workload, self.workload.config
        keeps = "never, torchtitan's default with a pipeline" if self.schedule_name else "all but norm and output"
        found = {
            "model": "hocket's layers under torchtitan's names",
            "units": "apply_fsdp: each layer, embedding, norm and output, experts if on other ranks",
            "reshard after forward": keeps,
            "prefetch": "explicit, one layer ahead" if self.mesh.ep > 1 else "default (implicit)",
            "reduce": f"{'fp32' if self.options.fp32 else c.precision.compute}, "
            + ("once a step" if self.schedule_name else "after every microbatch"),
            "optimizer": optimizer_name(w, "on fp32 shards"),
            "compile": "each layer" if w.compile and not self.overlap else "off",
        }
        if self.schedule_name:
            found["pipeline"] = self.schedule_name + (", overlap_callback" if self.overlap else "")
        if self.mesh.ep > 1:
            order = "torchtitan's padded permutation" if self.options.own_dispatcher else "hocket's gathers"
            style = "DualPipeExpertParallel" if self.overlap else "ExpertParallel, synchronous"
            found["experts"] = f"{style}; rows put in order by {order}; grouped GEMM of hocket"
        return found

    def close(self) -> None:
        """Let go of memory. The meshes stay: other contenders may use them."""
        del self.models, self.optimizer, self.schedule


@torch.no_grad()
def fill(model: nn.Module, workload: Workload, rank: int, device: torch.device) -> None:
    """First values of a sharded model; of experts on other ranks nothing is computed."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        local, sharded = param.to_local(), next(p for p in param.placements if p.is_shard())
        shape, parts, part = list(param.shape), mesh.dp, where.dp
        if ".experts." in name and mesh.ep > 1:
            shape[0] //= mesh.ep
            parts, part = mesh.edp, where.edp
        value = first_value(name, shape, workload, rank, device).to(param.dtype)
        pieces = value.chunk(parts, sharded.dim)  # pyrefly: ignore[missing-attribute]
        if part < len(pieces):
            local.copy_(pieces[part])


def check(workload: Workload) -> None:
    """Raise ValueError for what torchtitan does not take."""
    mesh, c = workload.mesh, workload.config
    prefix = "against = torchtitan (command line): "
    if mesh.dp == 1:
        raise ValueError(f"{prefix}it shards over data-parallel ranks, and mesh.dp = 1; fix: mesh.dp = 2 or more")
    microbatches = c.train.microbatches
    if schedule_of(workload) == "Interleaved1F1B" and microbatches % mesh.pp:
        raise ValueError(
            f"{prefix}Interleaved1F1B, and mesh.pp = {mesh.pp} does not divide train.microbatches = {microbatches}; "
            f"fix: train.microbatches = {mesh.pp * -(-microbatches // mesh.pp)}"
        )
