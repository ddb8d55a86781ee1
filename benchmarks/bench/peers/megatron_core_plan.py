"""hocket's layers as megatron-core's schedules see them, and cut into the nodes of its combined 1F1B.

megatron-core hides the all-to-alls of experts by running, layer by layer, the forward of one microbatch with the
backward of another (`overlap_moe_expert_parallel_comm`). A layer is four nodes: attention to permutation, dispatch,
experts, combine and the rest; dispatch and combine run on a stream of their own. The order of nodes, the streams, the
events between them and when memory is freed are megatron-core's; what a node computes is hocket's.

Tensors that both streams read stay referenced by the layer's state until its backward has been issued as a whole,
when the compute stream has waited for the other one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType  # pyrefly: ignore[missing-import]
from megatron.core.models.common.model_chunk_schedule_plan import (  # pyrefly: ignore[missing-import]
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import (  # pyrefly: ignore[missing-import]
    PostProcessNode,
    PreProcessNode,
    TransformerLayerNode,
)
from megatron.core.pipeline_parallel.utils import NoopScheduleNode  # pyrefly: ignore[missing-import]
from megatron.core.transformer.module import MegatronModule  # pyrefly: ignore[missing-import]
from torch import Tensor, nn

from benchmarks.bench.plain import Exchange, PlainModel
from hocket.layers.dispatch import Splits
from hocket.layers.routing import Routing
from hocket.model.documents import Microbatch
from hocket.model.layers import DenseLayer
from hocket.model.moe import MoELayer
from hocket.runtime.transports import RowTable
from hocket.runtime.weights import Weight, WgradQueue, collecting, manage


@dataclass(frozen=True)
class Experts:
    """How rows and their counts reach the experts; two communicators."""

    rows: Exchange
    counts: Exchange


@dataclass(eq=False)
class PlanLayer:
    """A layer as the schedule plan is given it."""

    config: Any
    layer: nn.Module
    experts: Experts
    wait: Callable[[], None] = lambda: None
    """Waits for the weights of the layer, which the nodes read without calling the layer itself."""
    late: LateGradients | None = None
    """Where weight gradients go that are computed by ops of their own."""


class Stage(MegatronModule):
    """One virtual stage: a plain model with what megatron-core's schedules ask of a model."""

    share_embeddings_and_output_weights = False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: Any, model: PlainModel, vp_stage: int, experts: Experts | None) -> None:
        super().__init__(config)
        self.model, self.vp_stage = model, vp_stage
        self.pre_process, self.post_process = model.embed is not None, model.head is not None
        self.input: Tensor | None = None
        if experts is not None:
            self.decoder = SimpleNamespace(
                layers=[PlanLayer(config, layer, experts) for layer in model.layers.values()]
            )

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the previous stage sent; called before every forward."""
        (self.input,) = tensors

    def forward(self, microbatch: Microbatch) -> Tensor:
        """The mean loss, or the hidden states [B, S, D] for the next stage."""
        x = microbatch.ids if self.pre_process else self.input
        return self.model(x, microbatch.targets)

    def build_schedule_plan(self, microbatch: Microbatch) -> ChunkPlan:
        """The nodes of a forward and backward, still to be run."""
        return ChunkPlan(self, microbatch.ids, None, None, labels=microbatch.targets)

    def announce_late_gradients(self) -> None:
        """Before DDP: gradients of layers do not come from autograd; DDP shall say what to call once they exist."""
        for part in self.decoder.layers:
            part.late = LateGradients(part.layer)
            part.layer.register_wgrad_accumulation_and_reduce_hooks = part.late.hooks.append
            for param in part.layer.parameters():
                param.skip_backward_post_hook = True

    def manage_weights(self) -> None:
        """After DDP has put the weights into its buffers: take them out of autograd."""
        for part in self.decoder.layers:
            assert part.late is not None
            part.late.manage()


@dataclass(eq=False)
class LateGradients:
    """Weight gradients of a layer: computed when megatron-core says so, then handed to its DDP."""

    layer: nn.Module
    hooks: list[Callable[[], None]] = field(default_factory=list)
    """What DDP wants called for each parameter, in their order."""
    ready: dict[Weight, tuple[nn.Parameter, Callable[[], None]]] = field(default_factory=dict)

    def manage(self) -> None:
        for (name, param), hook in zip(self.layer.named_parameters(), self.hooks, strict=True):
            weight = manage(param, name)
            weight.value = param.detach()
            self.ready[weight] = (param, hook)

    @torch.no_grad()  # gradients that came from another pipeline rank say that they require gradients
    def compute(self, queue: WgradQueue) -> None:
        """Compute what a node's backward left over; DDP adds it up and reduces full buckets."""
        found: dict[Weight, Tensor] = {}

        def target(weight: Weight) -> Tensor:
            if weight not in found:
                found[weight] = torch.empty_like(weight.tensor())
            return found[weight]

        queue.drain(target)
        while found:
            weight, grad = found.popitem()
            param, hook = self.ready[weight]
            param.grad = grad
            hook()


class Late:
    """The weight gradients of one node of one microbatch, as the schedule plan calls them."""

    def __init__(self, gradients: LateGradients) -> None:
        self.gradients, self.queue = gradients, WgradQueue()

    def backward_dw(self) -> None:
        self.gradients.compute(self.queue)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters with hooks of their own: none, DDP's are called above."""
        return iter(())


class LayerPlan(TransformerLayerSchedulePlan):
    """The nodes of one layer for one microbatch."""

    def _build_callable_nodes(self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]) -> None:
        part: PlanLayer = self.layer
        moe = isinstance(part.layer, MoELayer)
        parts = MoEParts(part) if moe else DenseParts(part)
        # Two local experts or more: what reaches the experts is copied into their order, so it may be freed.
        extra_args.update(config=part.config, is_moe=moe, num_local_experts=2, is_mtp=False)
        extra_args["delay_wgrad_compute"] = part.late is not None

        def node(name: str, stream: Any, function: Any, late: Late | None = None) -> Any:
            return TransformerLayerNode(
                stream, event, self.layer_state, self.chunk_state, function,
                name=name, bwd_dw_callables=late or [], extra_args=extra_args,
            )  # fmt: skip

        self.pre_dispatch_computation = node("pre_dispatch_computation", comp_stream, parts.before, parts.late_before)
        self.mlp = node("mlp", comp_stream, parts.inside, parts.late_inside)
        self.mtp_post_process = NoopScheduleNode()
        if isinstance(parts, MoEParts):
            self.moe_dispatch = node("moe_dispatch", comm_stream, parts.dispatch)
            self.moe_combine = node("moe_combine", comm_stream, parts.combine)
        else:
            self.moe_dispatch, self.moe_combine = NoopScheduleNode(), NoopScheduleNode()

    def get_low_precision_context(self) -> Any:
        return contextlib.nullcontext()


class DenseParts:
    """What the nodes of a dense layer compute."""

    def __init__(self, part: PlanLayer) -> None:
        self.part, self.layer = part, part.layer
        self.late_before = Late(part.late) if part.late else None
        self.late_inside = Late(part.late) if part.late else None

    def before(self, node: Any, x: Tensor) -> Any:
        self.part.wait()
        with gathering(self.late_before):
            return self.layer.forward_attn(x)  # pyrefly: ignore[not-callable]

    def inside(self, node: Any, x: Tensor) -> Tensor:
        with gathering(self.late_inside):
            return self.layer.forward_mlp(x)  # pyrefly: ignore[not-callable]


class MoEParts(DenseParts):
    """What the nodes of a MoE layer compute."""

    def before(self, node: Any, x: Tensor) -> Tensor:
        self.part.wait()
        with gathering(self.late_before):
            rows_RD, residual, shared, weights, probs, routing = self.layer.forward_attn(x)  # pyrefly: ignore[not-callable]
        state = node.layer_state
        # They skip the nodes between; their gradients come back to this node by the detached copies.
        state.residual = node.detach(residual)
        for name, value in (("shared", shared), ("weights", weights), ("probs", probs)):
            setattr(state, name, None if value is None else node.detach(value))
        state.routing = routing
        state.counts = Counts(routing, self.part.experts.counts)
        return rows_RD

    def dispatch(self, node: Any, rows_RD: Tensor) -> Tensor:
        splits = node.layer_state.splits = node.layer_state.counts.read()
        return self.part.experts.rows.move(rows_RD, splits.table.receive, splits.table.send)

    def inside(self, node: Any, x: Tensor) -> Tensor:
        state = node.layer_state
        with gathering(self.late_inside):
            return self.layer.forward_experts(x, state.weights, state.splits)  # pyrefly: ignore[not-callable]

    def combine(self, node: Any, rows_RD: Tensor) -> Tensor:
        state = node.layer_state
        table = state.splits.table
        rows_RD = self.part.experts.rows.move(rows_RD, table.send, table.receive)
        return self.layer.forward_unpermute(  # pyrefly: ignore[not-callable]
            rows_RD, state.residual, state.shared, state.probs, state.routing
        )


class Counts:
    """How many rows go where: asked for on the device now, read by the host when the rows are sent."""

    def __init__(self, routing: Routing, exchange: Exchange) -> None:
        every_PPL, self.rank = exchange.all_counts(routing.counts_E.view(exchange.size, -1)), exchange.rank
        self.received_PL = every_PPL[:, self.rank].contiguous()
        sizes = every_PPL.sum(-1)
        self.host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=sizes.is_cuda)
        self.host.copy_(sizes, non_blocking=True)
        self.copied = torch.Event(sizes.device)
        self.copied.record()

    def read(self) -> Splits:
        self.copied.synchronize()
        return Splits(RowTable(self.host.tolist(), self.rank), self.received_PL)


class EmbedNode(PreProcessNode):
    """The first node of a chunk: the embedding, or what the previous stage sent."""

    def forward_impl(self) -> Tensor:
        stage: Stage = self.model
        embed = stage.model.embed
        return stage.input if embed is None else embed(self.chunk_state.input_ids)  # pyrefly: ignore


class HeadNode(PostProcessNode):
    """The last node of a chunk with a head: the mean loss."""

    def forward_impl(self, x_BSD: Tensor) -> Tensor:
        return self.model.model.head.loss(x_BSD, self.chunk_state.labels)


class ChunkPlan(TransformerModelChunkSchedulePlan):
    """The nodes of a virtual stage for one microbatch."""

    LAYER_SCHEDULE_PLAN_CLASS = LayerPlan
    PRE_PROCESS_NODE_CLASS = EmbedNode
    POST_PROCESS_NODE_CLASS = HeadNode


def gathering(late: Late | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if late is None else collecting(late.queue)


def wait_for_whole_layers(chunk: Any, stage: Stage, *, compiled: bool) -> None:
    """Have dense layers wait for all their weights when they begin, and nodes of a plan for those of their layer.

    megatron-core's DDP waits in a hook before every submodule; hooks inside a compiled layer would break its graph,
    and a plan calls parts of layers, before which there is no hook. Buckets are larger than layers, so waiting for a
    whole layer costs nothing.
    """
    hook = chunk._make_forward_pre_hook()
    for layer in stage.model.layers.values():
        if isinstance(layer, DenseLayer):
            for module in [part for part in layer.modules() if part is not layer]:
                chunk.remove_forward_pre_hook_handles.pop(module).remove()
            layer.forward = _after(_waiter(hook, layer, whole=True), layer.forward)
    if hasattr(stage, "decoder"):
        for part in stage.decoder.layers:
            dense = isinstance(part.layer, DenseLayer)
            part.wait = _waiter(hook, part.layer, whole=dense)
            if compiled and dense:
                part.layer.forward_attn = torch.compile(part.layer.forward_attn, fullgraph=True, dynamic=False)
                part.layer.forward_mlp = torch.compile(part.layer.forward_mlp, fullgraph=True, dynamic=False)


def _waiter(hook: Callable[[nn.Module], None], layer: nn.Module, *, whole: bool) -> Callable[[], None]:
    modules = list(layer.modules()) if whole else [layer]

    def wait() -> None:
        for module in modules:
            hook(module)

    return wait


def _after(wait: Callable[[], None], forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        wait()
        return forward(*args)

    return run
