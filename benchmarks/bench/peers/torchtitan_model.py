"""hocket's layers under the names by which torchtitan finds its way through a model, and with its experts' plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.dual_pipe_v import DualPipeExpertParallel  # pyrefly: ignore[missing-import]
from torchtitan.distributed.expert_parallel import ExpertParallel  # pyrefly: ignore[missing-import]
from torchtitan.models.moe import MoE  # pyrefly: ignore[missing-import]

from benchmarks.bench.plain import Exchange, PlainModel, compile_layers
from benchmarks.bench.workload import Workload
from hocket.config import ModelConfig
from hocket.layers.dispatch import Splits, group_rows, ungroup_rows
from hocket.layers.functional import grouped_linear
from hocket.model.documents import Documents
from hocket.model.layers import DenseLayer, swiglu
from hocket.model.moe import Experts, MoELayer
from hocket.model.parts import ONLY
from hocket.model.transformer import Chunk
from hocket.runtime.transports import RowTable


class TitanModel(nn.Module):
    """A virtual stage; parameters are named as in the whole model, for the first name of a module is hocket's."""

    def __init__(self, model: PlainModel) -> None:
        super().__init__()
        self.embed, self.layers, self.head = model.embed, model.layers, model.head
        self.tok_embeddings, self.output = model.embed, model.head
        # hocket's head has its norm inside; torchtitan wants one before it, in the same unit.
        self.norm = None if model.head is None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] with a head, else hidden states [B, S, D]."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is None or self.output is None:
            return x
        return self.output(self.norm(x))


class TitanExperts(Experts):
    """All experts of a layer, of which a rank comes to hold some. Called with rows in the order of the experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.experts)
        self.num_experts = config.experts

    def forward(self, rows_RD: Tensor, counts_L: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        offsets_L = counts_L.cumsum(0, dtype=torch.int32)
        w_gate_up, w_down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w_gate_up, self.w_down))
        return grouped_linear(swiglu(grouped_linear(rows_RD, w_gate_up, offsets_L)), w_down, offsets_L)


class ExpertsHolder(MoE):
    """What torchtitan looks for in a layer as `moe`: it counts modules of this class and finds the experts in it."""

    def __init__(self, experts: TitanExperts) -> None:
        nn.Module.__init__(self)
        self.experts = experts


class TitanMoELayer(MoELayer):
    """A MoE layer whose experts' module sends the rows away and brings them back, in hooks of torchtitan."""

    moe_enabled = True

    def __init__(self, config: ModelConfig, aux_scale: float) -> None:
        super().__init__(config, ONLY, aux_scale)
        self.experts = TitanExperts(config)
        self.weighted = False
        self.moe = ExpertsHolder(self.experts)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        rows_RD, residual_BSD, shared_BSD, _, probs_TK, routing = self.forward_attn(x_BSD, documents)
        rows_RD = self.experts(rows_RD, routing.counts_E)
        return self.forward_unpermute(rows_RD, residual_BSD, shared_BSD, probs_TK, routing)


class GatheringExpertParallel(ExpertParallel):
    """torchtitan's `ExpertParallel` with hocket's way to put rows in order: gathers, and no padding."""

    splits: Splits

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        rows_RD, counts_E = inputs
        group, size = device_mesh.get_group(), device_mesh.size()
        with torch.no_grad():
            rank = device_mesh.get_local_rank()
            every_PPL = Exchange(group, size, rank).all_counts(counts_E.view(size, -1))
            table, received_PL = RowTable(every_PPL.sum(-1).tolist(), rank), every_PPL[:, rank].contiguous()
        self.splits = Splits(table, received_PL)
        rows_RD = all_to_all_single_autograd(rows_RD, table.receive, table.send, group)
        return group_rows(rows_RD, self.splits), received_PL.sum(0)

    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        splits, group = self.splits, device_mesh.get_group()
        rows_RD, table = ungroup_rows(routed_output, splits), splits.table
        return all_to_all_single_autograd(rows_RD, table.send, table.receive, group)


def titan_model(workload: Workload, layers: range, first: bool, last: bool, *, compiled: bool) -> TitanModel:
    """A virtual stage on the meta device, whole. Its MoE layers have all experts, until `move_experts`."""
    config = workload.config
    scale = 1.0 / (config.train.microbatches * workload.mesh.dp)
    chunk = Chunk(config.model, layers, first, last, aux_scale=scale)
    for number, layer in list(chunk.layers.items()):
        if isinstance(layer, MoELayer):
            chunk.layers[number] = TitanMoELayer(config.model, scale)
    model = PlainModel(chunk)
    for layer in model.layers.values():
        if isinstance(layer, DenseLayer):
            layer.moe_enabled = False  # pyrefly: ignore
    if compiled:
        compile_layers(model)
    return TitanModel(model)


def move_experts(model: TitanModel, mesh: DeviceMesh, *, overlap: bool, own: bool) -> None:
    """Spread the experts over the ranks of `mesh`; `own` takes torchtitan's dispatcher as it is."""
    for layer in model.layers.values():
        if isinstance(layer, TitanMoELayer):
            style = ExpertParallel() if own else GatheringExpertParallel()
            parallelize_module(layer.experts, mesh, DualPipeExpertParallel(style) if overlap else style)
