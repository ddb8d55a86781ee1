"""One rank's planned training: builds the program, the sharded model, the optimizer and the executor.

The trainer, the benchmarks and the tests all drive this. The default process group must exist unless the
world has one rank or the transport is `null`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.config import Config
from hocket.engine.actions import Actions, Activation
from hocket.engine.executor import Executor
from hocket.engine.experts import Balance, RowRoom
from hocket.engine.graphed import GraphedSteps, Record, Way, from_turn_one, recorder_of
from hocket.engine.hang_report import HangReport
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.optimizer import AdamWOptions, MuonOptions, PlannedAdamW
from hocket.kernels import IGNORED
from hocket.layers.linears import Linears, SplitLinears, gathered_in_fp8, linears_of
from hocket.layers.slices import whole_shape
from hocket.layers.tensor import TensorParallel, ways_of
from hocket.model.context import ContextRank
from hocket.model.documents import Context, Documents, Microbatch
from hocket.model.parts import ExpertPlace
from hocket.model.source import ChunkPlace, ModelSource, OwnTransformer
from hocket.predict.arrivals import p2p_bytes, rows_bytes, tokens_bytes
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.part_sizes import attending
from hocket.predict.simulate import host_bytes
from hocket.program.check import assert_valid
from hocket.program.linearize import linearize
from hocket.program.lower import build_forward, build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import MATRIX_SLOTS
from hocket.program.stages import layout_of, mesh_of, sharding_of
from hocket.runtime.comm import CommOptions, Groups, Link, make_groups
from hocket.runtime.hangs import MARGIN, Recorder
from hocket.runtime.lanes import CpuLanes, CudaLanes, Lanes, SideStream, spinner
from hocket.runtime.tokens import CopiedTokens
from hocket.runtime.weights import DTYPES
from hocket.runtime.world import everyone


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step. They are tensors, so that reading the result does not wait for the GPU."""

    loss: Tensor
    """This rank's summand of the step's mean cross-entropy, fp32. Its mean over data-parallel ranks is the step's loss;
    0 on ranks without the head."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    loads: dict[int, Tensor]
    """Rows per expert in each MoE layer of this pipeline rank, summed over data-parallel ranks: int64 [E]."""
    skipped: Tensor
    """Whether the update was skipped and weights did not change: a bool."""
    lacked: int = 0
    """Rows of the fullest rank if over capacity, so that the step ran again with splits known to the host; else 0."""
    grown: bool = False
    """After an overflow: whether the capacity was raised. If not, the host reads the splits in all later steps."""
    way: Way = "issued"
    """How the host issued the step."""
    imbalance: float | None = None
    """With context parallelism over documents: excess attention work of the busiest rank; 0.05 is 5 % over the mean."""


class Agreed(NamedTuple):
    """Results that all ranks have reduced together."""

    loss: float
    loads: dict[int, float]
    signal: int
    imbalance: float | None
    grad_norm: float
    """Of the last step, before clipping."""
    skipped: bool
    """Whether the last step's update was skipped."""
    skipped_of_run: int


class Engine:
    """One rank of a planned run. `config` must be resolved: no setting is `auto`.

    `groups` may be shared by engines of one mesh that take turns; by default the engine makes its own. Without `update`
    there is no optimizer: a step drops its reduced gradients, and weights do not change. `source` makes the model, by
    default hocket's own transformer.
    """

    lane_seed = 0
    """Seed of the order in which a CPU runs the lanes' ops. Every legal order gives the same result; tests vary it."""

    def __init__(
        self,
        config: Config,
        rank: int,
        device: torch.device,
        *,
        groups: Groups | None = None,
        update: bool = True,
        source: ModelSource | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.source: ModelSource = source or OwnTransformer(config)
        on_gpu = device.type == "cuda"
        self.mesh = mesh_of(config)
        self.where = self.mesh.coordinates(rank)
        self.layout: Layout = self.source.layout(config)
        self.dtype = DTYPES[config.precision.dtype]
        self.program = build_program(self.layout, config.train.microbatches, config, sharding_of(config))
        assert_valid(self.program)
        transport = config.train.transport
        assert transport != "auto", "the configuration is not resolved"
        self._groups_given = groups is not None
        self.groups = groups or make_groups(self.mesh, rank, device, transport, comm_options(config, device))
        self.room = RowRoom(config, self.groups, device)
        self._tensors = TensorParallel.of(self.groups.tp, device) if self.mesh.tp > 1 else None
        self._linears = self._make_linears()
        self.shared = self._share()
        ends: dict[str, nn.Parameter] = {}
        self.chunks: list[Any] = [self._chunk(chunk, ends) for chunk in range(self.layout.chunks)]
        self.balance = Balance(self.chunks, self.groups, config.model.bias_rate)
        self.sharded = PlannedModel(
            self.chunks,
            self.mesh,
            self.groups,
            self.program,
            self.dtype,
            device,
            wire=DTYPES.get(config.precision.wire),
            in_fp8=gathered_in_fp8(config),
        )
        t, averages = config.train, DTYPES[config.precision.averages]
        options = AdamWOptions(
            betas=t.betas,
            eps=t.eps,
            weight_decay=t.weight_decay,
            clip=t.clip,
            averages=averages,
            decays=self._decays,
            muon=self._muon(),
            spike=config.optimizer.skip_spikes,
        )
        self._optimizer = PlannedAdamW(self.sharded, self.groups.control, options) if update else None
        self._leaves_updates = update and config.overlap.dp.update == "next_step"
        self._lr = t.lr
        sides = [] if self._tensors is None else [self._tensors.side]
        lanes = self.layout.lanes
        self.lanes: Lanes = CudaLanes(device, sides, lanes) if on_gpu else CpuLanes(lanes)
        # A step's numbers are read on a separate stream: see Note: [A step's numbers come before its updates].
        self._numbers = SideStream(device)
        self._loss_of_step = self._grad_norm = torch.zeros((), device=device)
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)
        self.learnt = torch.zeros((), dtype=torch.int64, device=device)
        """Targets that counted in the last step or validation, summed over data-parallel ranks."""
        self.executor = self.executor_for(self.program, self._finish_step)
        self._validation: Executor | None = None
        self._graphed: GraphedSteps | None = None
        if config.plan.graphs == "on":
            assert isinstance(self.lanes, CudaLanes), "graphs are of calls to a GPU"
            self._graphed = self.graphed_by(recorder_of(self.lanes))

    def graphed_by(self, record: Record) -> GraphedSteps:
        """Makes the recorder of this engine's steps."""
        tp, one = self.groups.tp, torch.zeros(1, device=self.device)
        tokens = tp.tokens()
        if isinstance(tokens, CopiedTokens):
            record = from_turn_one(record, tokens, lambda: tp.all_reduce(one).wait())
        updates = self._optimizer if self._leaves_updates else None
        return GraphedSteps(
            self.executor, self.sharded, record, lambda: [group.transport for group in self.groups], updates
        )

    def _chunk(self, chunk: int, ends: dict[str, nn.Parameter]) -> Any:
        pp, layout = self.where.pp, self.layout
        place = ExpertPlace(self.mesh.ep, self.where.ep, layout.per_rank, layout.makes_rows_later)
        first, last = layout.is_first(pp, chunk), layout.is_last(pp, chunk)
        layers = layout.layers(pp, chunk)
        where = place, self.device, self._linears, self.groups
        return self.source.chunk(ChunkPlace(layers, first, last, *where, ends))

    def _decays(self, name: str, shape: Sequence[int]) -> bool:
        return self.config.optimizer.decays((name, self.source.own_name(name)), shape)

    def _muon(self) -> MuonOptions | None:
        config, optimizer = self.config, self.config.optimizer
        if optimizer.name != "muon":
            return None
        return MuonOptions(
            takes=optimizer.by_muon,
            decays=self._decays,
            weight_decay=config.train.weight_decay,
            scale=optimizer.scale,
            slots=MATRIX_SLOTS if config.overlap.dp.update == "next_step" else 1,
        )

    def _make_linears(self) -> Linears:
        """Linear layers on whole weights, or on a tensor-parallel rank's slices."""
        if self._tensors is None:
            return linears_of(self.config)
        return SplitLinears(self._tensors, ways_of(self.config), self.config.train.sequences)

    def _share(self) -> ContextRank | None:
        """Cuts this rank's part out of each sequence; None without context parallelism."""
        c, ranks = self.config, self.mesh.cp
        if ranks == 1:
            return None
        length = c.data.sequence_length
        even = None if c.overlap.cp.method == "heads" else attending(c.model, length)
        return ContextRank(c.train.sequences, length, ranks, self.where.cp, self.device, even)

    def _activation(self) -> Activation:
        """Describes the activation between layers: this rank's tokens of a microbatch."""
        c = self.config
        shape = (c.train.sequences, c.tokens // c.train.sequences) if self.mesh.tp == 1 else (1, c.tokens)
        return Activation((*shape, c.model.hidden), self.dtype, self.device)

    def executor_for(self, program: Program, on_step: Callable[[], None] | None) -> Executor:
        """An executor for a program on this engine's weights and groups; same layout, and no more slots.

        `on_step` implements the program's `step` op; with None, for a forward-only program, no graphs are kept.
        """
        pp = self.where.pp
        units, activation = self.sharded.units, self._activation()
        actions = Actions(self.layout, self.chunks, units, self.groups, activation, on_step, self.room)
        actions.allocating = self.lanes.allocating
        if on_step is not None and self._optimizer is not None:
            actions.on_update, actions.on_matrices = self._optimizer.update, self._optimizer.with_matrices
        on_gpu = self.device.type == "cuda"
        order = [p for rank, p in linearize(program, None if on_gpu else self.lane_seed) if rank == pp]
        return Executor(program, pp, actions, self.lanes, Recorder(program.ranks[pp], self.groups.begin), order)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that this rank's steps need, by the cost model."""
        costs = costs_of(self.config, hardware_of(self.config))
        return host_bytes(self.program, self.where.pp, costs)

    @property
    def skipped(self) -> Tensor:
        """Updates skipped in this run so far: an integer on the device."""
        assert self._optimizer is not None, "this engine has no optimizer"
        return self._optimizer.guard.total

    @property
    def optimizer(self) -> PlannedAdamW:
        """The optimizer, after all pending updates; only if the engine updates weights."""
        assert self._optimizer is not None, "this engine has no optimizer"
        self._optimizer.catch_up()
        return self._optimizer

    def catch_up(self) -> None:
        """Apply the updates that the last step deferred to the next one, before weights are read."""
        if self._optimizer is not None:
            self._optimizer.catch_up()

    def init_weights(self) -> None:
        """Initialize every weight; the values are the same on any mesh."""
        self.catch_up()  # a deferred update must not change the new values
        self.init_buffers()
        first = self.where.ep * (self.config.model.experts // self.mesh.ep)
        shapes = {w.name: w.shape for unit in self.sharded.units.values() for w in unit.weights}
        tensors = self.sharded.tensors
        self.sharded.load(
            lambda name: self.source.value(name, whole_shape(name, shapes[name], tensors), first, self.device)
        )
        for name, bias in self.balance.biases().items():
            bias.copy_(self.source.value(name, tuple(bias.shape), 0, self.device))

    def init_buffers(self) -> None:
        """Initialize buffers. That is enough if a checkpoint is loaded next."""
        for chunk in self.chunks:
            self.source.begin(chunk, self.device)

    def train_step(self, microbatches: Sequence[Microbatch], lr: float) -> StepResult:
        """One optimizer step over this rank's microbatches. With the `null` transport `lr` is taken as 0.

        With `overlap.dp.update = next_step` weights change at the start of the next step, or in `catch_up`.
        """
        assert len(microbatches) == self.program.microbatches
        self._lr = 0.0 if self.config.train.transport == "null" else lr
        self._run(self.executor, microbatches)
        lacked = self.room.lacked
        grown = lacked > 0 and self.room.now is not None
        way = "issued" if self._graphed is None or lacked else self._graphed.way
        uneven = None if self.shared is None else self.shared.imbalance
        return StepResult(
            self._loss_of_step, self._grad_norm, self.balance.loads, self._skipped, lacked, grown, way, uneven
        )

    @property
    def replays(self) -> bool:
        """Whether steps after the first ones are replayed."""
        return self._graphed is not None

    def _finish_step(self) -> None:
        """The plan's `step` op, which runs after every gradient has been reduced."""
        enter = self.executor.recorder.enter
        enter("looking for rows that found no room")
        lacked = self.room.check_overflow()
        self.sharded.complete_grads()
        enter("the sum, over tensor-parallel ranks, of gradients that all of them have")
        self.sharded.sum_shared_grads()
        actions = self.executor.actions
        self._loss_of_step = self._loss(actions.losses, self.executor)
        if self._optimizer is None or lacked:
            self._numbers.fork()
            self.sharded.forget_grads()
            actions.loads.clear()
            return
        enter("the norm of all gradients")
        self._grad_norm = self._optimizer.judge(self._lr)
        self._skipped = self._optimizer.guard.skipped
        enter("the sum of the experts' loads")
        self.balance.update(actions.loads, self._skipped)
        self._numbers.fork()
        enter("the optimizer")
        self._optimizer.apply(later=self._leaves_updates)
        if self._optimizer.exchanges:  # then the host waits here: a hang in an update is reported in this step
            self._numbers.fork()

    def _run(self, executor: Executor, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Run all ops once. If rows exceeded the capacity, run them again with splits known to the host.

        See Note: [Fixed capacity without dropped rows].
        """
        assert self.config.data.packing != "off" or all(m.documents is None for m in microbatches), "packing is off"
        if self.shared is not None:
            microbatches = self.shared.parts(microbatches)
        microbatches = self.with_loss_weights(microbatches, executor)
        self.sharded.forget_casts()
        graphed = self._graphed if executor is self.executor else None
        losses = (graphed or executor).run(microbatches)
        if not executor.actions.training:  # a training step does so before it changes weights
            self.room.check_overflow()
        if self.room.lacked:
            self.forget_graph()
            executor.assert_clean()
            executor.rehearse()
            losses = self.room.rerun(lambda: executor.run(microbatches))
            if self.room.now is None:  # the host must read splits from now on, so steps cannot be replayed
                self._graphed = None
        return losses

    def with_loss_weights(self, microbatches: Sequence[Microbatch], executor: Executor) -> list[Microbatch]:
        """Sets the weight of each microbatch's loss, and returns packed ones with weights for their other means.

        See Note: [The mean over the tokens of a step].
        """
        counts_M3 = torch.stack([_counts(microbatch) for microbatch in microbatches])
        total_3 = counts_M3.sum(0)
        executor.recorder.active = True  # ranks already wait for each other here, before the step's first op
        executor.recorder.enter("the sum of all ranks' targets, ahead of all ops")
        self.groups.sum_over_dp(total_3)
        self.learnt = total_3[0]
        executor.actions.weights_M = (counts_M3[:, 0].double() * self.mesh.data / total_3[0].clamp(min=1)).float()
        if self.config.data.packing == "off":
            return list(microbatches)
        weights_2 = (self.mesh.data / total_3[1:].clamp(min=1).double()).float()
        return [_with_means(microbatch, weights_2) for microbatch in microbatches]

    def _loss(self, losses: Sequence[Tensor], executor: Executor) -> Tensor:
        """The summand of this rank's microbatches, in order, of the mean over data-parallel ranks."""
        if not losses:
            return torch.zeros((), device=self.device)
        return (torch.stack(list(losses)) * executor.actions.weights_M).sum()

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """The loss of a forward pass, as `StepResult.loss`."""
        assert len(microbatches) == self.program.microbatches
        self.catch_up()
        return self._loss(self._run(self.validating, microbatches), self.validating)

    @property
    def validating(self) -> Executor:
        """The executor of forward-only steps."""
        if self._validation is None:
            program = build_forward(self.program, self.config, sharding_of(self.config))
            assert_valid(program, forward_only=True)
            self._validation = self.executor_for(program, None)
        return self._validation

    def watch(self, microbatches: Sequence[Microbatch], see: Callable[[Op, Any], None]) -> None:
        """Run forward without training, and call `see` with each compute op and its result."""
        self.validating.watch(see)
        try:
            self.evaluate(microbatches)
        finally:
            self.validating.watch(None)

    def agree(
        self, loss: Tensor, loads: Mapping[int, Tensor] | None = None, signal: int = 0, imbalance: float | None = None
    ) -> Agreed:
        """Reduce over all ranks: the mean loss of data-parallel ranks; the maxima of loads, signal and imbalance.

        `loads` are this rank's rows per expert by layer. The result has, for each such layer of any rank, the load of
        the busiest expert over the mean. Waits for the step, but not for the updates of weights. Collective: every
        rank calls this.

        Note: [A step's numbers come before its updates]
        Loss, norm and loads are known before the optimizer's kernels run. So they are summed and read on a separate
        stream, forked before the updates. The host issues the next step while the GPU updates weights, and the GPU
        never idles before the first ops of a step. Where updates communicate, the host waits for them.
        """
        for executor in self._executors:
            if executor.recorder.active:
                executor.recorder.enter("the mean of all ranks' losses, after all ops")
        if loss is not self._loss_of_step:  # such as a validation loss
            self._numbers.fork()
        with self._numbers.on():
            agreed = self._agreed(loss, loads, signal, imbalance)
        for executor in self._executors:
            executor.recorder.end()
        return agreed

    def _agreed(self, loss: Tensor, loads: Mapping[int, Tensor] | None, signal: int, imbalance: float | None) -> Agreed:
        total = loss.double().reshape(1) / (self.mesh.data * self.mesh.tp)
        largest = torch.zeros(len(self.layout.kinds) + 2, device=self.device)
        largest[-2:] = torch.tensor([float(signal), imbalance or 0.0])
        if loads:
            rows = torch.stack(list(loads.values())).float()
            largest[list(loads)] = rows.amax(1) / rows.mean(1)
        self.groups.control.all_reduce(total).wait()
        self.groups.control.all_reduce(largest, "max").wait()
        *of_layers, most, uneven = largest.tolist()
        by_layer = {n: load for n, load in enumerate(of_layers) if load}
        skipped = self._skipped if self._optimizer is None else self.skipped
        numbers = total[0], self._grad_norm, self._skipped, skipped
        mean, norm, once, often = torch.stack([each.double() for each in numbers]).tolist()
        uneven = None if imbalance is None else uneven
        return Agreed(mean, by_layer, int(most), uneven, norm, bool(once), int(often))

    @property
    def _executors(self) -> list[Executor]:
        return [self.executor, *([self._validation] if self._validation else [])]

    @property
    def current_recorder(self) -> Recorder | None:
        """The recorder of the active executor."""
        return next((e.recorder for e in self._executors if e.recorder.active), None)

    def report(self, rank: int, device: bool = True) -> str:
        """The hang report of this rank; without `device` it queries only the host."""
        recorder = self.current_recorder
        return "" if recorder is None else HangReport(rank, recorder, self.groups, self.lanes, device).text()

    def assert_clean(self) -> None:
        """Assert that a step has left no value, segment, slot or pending collective."""
        for executor in self._executors:
            executor.assert_clean()
        self.sharded.assert_clean()

    def forget_graph(self) -> None:
        """Drop the recording, if any: the next step is recorded again."""
        if self._graphed is not None:
            self._graphed.drop()

    def abort(self) -> None:
        """Clean up after an exception inside a step. Weights and optimizer state stay.

        All ranks must do this at the same point: a message that was sent but not received cannot be recalled.
        """
        self.lanes.abort()  # first: the caller's later work must run after all work that used the memory
        self.forget_graph()
        self.room.forget()
        for executor in self._executors:
            executor.abort()
        self.catch_up()  # the deferred updates are those of the step before, which was complete
        self.sharded.abort()

    def close(self) -> None:
        """Free memory and the process groups that this engine has made; groups passed in stay."""
        self.forget_graph()
        if not self._groups_given:
            self.groups.destroy()


def _counts(microbatch: Microbatch) -> Tensor:
    """Targets that count, tokens that are not padding, and sequences with at least one such token: int64 [3]."""
    learnt_BS, documents = microbatch.targets != IGNORED, microbatch.documents
    real_T = None if documents is None else documents.real_T
    real_BS = torch.ones_like(learnt_BS) if real_T is None else real_T.view_as(learnt_BS)
    return torch.stack([learnt_BS.sum(), real_BS.sum(), real_BS.any(1).sum()])


def _with_means(microbatch: Microbatch, weights_2: Tensor) -> Microbatch:
    """A packed microbatch with the weights of its tokens and sequences."""
    documents = microbatch.documents
    assert isinstance(documents, Documents | Context), "packed microbatches have documents"
    return replace(microbatch, documents=replace(documents, weights_2=weights_2))


# --------------------------------------------------------------------------------------------------------- comm options
#
# How the process groups of a configuration are made.


def comm_options(config: Config, device: torch.device) -> CommOptions:
    """Timeouts, buffer sizes and imitated links of a resolved configuration's groups."""
    train = config.train
    options = CommOptions(
        timeout=train.hang_timeout + MARGIN,
        arrival=rows_bytes(config),
        tokens=tokens_bytes(config),
        p2p=p2p_bytes(config),
        device_splits=layout_of(config).uncounted,
    )
    if train.transport != "slow":
        return options
    links = {purpose: Link(*numbers) for purpose, numbers in train.slow_links().items()}
    spin = spinner(device) if device.type == "cuda" else None
    return replace(options, tokens=0, links=links, spin=spin)  # copy engines cannot imitate a slow link


# ---------------------------------------------------------------------------------------------------------------- blame
#
# Finds the source of a non-finite number once it has ended a run, when time does not matter.


Found = tuple[float, int, int, str]
"""(layer, part, microbatch) of an op, and its name: the minimum ran first."""


def blame(engine: Engine, microbatches: Sequence[Microbatch]) -> str:
    """Names the first op with a non-finite output, and its rank; or the last unit with a non-finite gradient.

    Runs forward once more on the microbatches. Collective: every rank calls this and gets the same text; empty if all
    is finite.
    """
    seen: list[Found] = []

    def see(op: Op, result: Any) -> None:
        losses = engine.validating.actions.losses[-1:] if op.part == "head" else []
        if not all(map(_finite, [*_tensors(result), *losses])):
            seen.append((*_place(op, engine), str(op)))

    engine.watch(microbatches, see)
    found = [(*mine, rank) for rank, mine in enumerate(everyone(min(seen, default=None))) if mine]
    if found:
        *_, op, rank = min(found)
        return f"the first output that is not finite is that of {op} on rank {rank}"
    units = sorted({unit for mine in everyone(engine.optimizer.not_finite()) for unit in mine})
    if units:
        _, unit = units[-1]
        return f"all outputs of its forward are finite, and backward loses that in the gradient of {unit}"
    return ""


def _place(op: Op, engine: Engine) -> tuple[float, int, int]:
    if op.layer < 0:
        return (-1.0 if op.part == "embed" else float("inf")), 0, op.microbatch
    parts = [part.name for part in engine.layout.type_of(op.layer).parts]
    return float(op.layer), parts.index(op.part), op.microbatch


def _tensors(result: Any) -> list[Tensor]:
    several = result if isinstance(result, list | tuple) else [result]
    return [each for each in several if isinstance(each, Tensor) and each.is_floating_point()]


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())
