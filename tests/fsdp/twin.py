"""A sharded module beside its unsharded twin: every loss and every weight of the two is compared, bit by bit.

The twin is plain torch. One process computes the microbatches of all ranks, and adds their gradients up in the order
that sharding promises: ranks of the inner group ascending, scaled once, microbatches ascending, then ranks of the outer
group ascending.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hocket
from hocket.fsdp.options import Precision
from hocket.fsdp.shard_groups import Placement
from tests.fsdp.elements import here, local
from tests.fsdp.kinds import ZOO, Kind, batch, loss_of
from tests.helpers.parity import LINEAR


def at_once(params: Sequence[Tensor]) -> bool:
    """Whether an optimizer may update all parameters at once, as on GPUs: they are all DTensors, or none is.

    One by one takes long, for DTensor looks at each op of each shape in every new process.
    """
    return len({isinstance(param, DTensor) for param in params}) == 1


OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, foreach=at_once(params)),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, eps=LINEAR, foreach=at_once(params)),
    "adamw_one_by_one": lambda params: torch.optim.AdamW(params, lr=0.1, eps=LINEAR),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.1, eps=LINEAR, foreach=True, amsgrad=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, eps=LINEAR, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, eps=LINEAR),
}


class Model(Protocol):
    """What is not in the zoo."""

    @property
    def kind(self) -> Kind: ...
    @property
    def exact(self) -> bool: ...


@dataclass(frozen=True)
class Case:
    """One way to shard and train one model."""

    model: str | Model
    """A name in the zoo, or a model."""
    strategy: str = "optim_grads_params"
    microbatches: int = 1
    mesh: tuple[int, ...] | None = None
    """None leaves it to `fully_shard`."""
    experts: int = 1
    """Ranks that hold different experts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    sync: Literal["each", "no_sync", "accumulating"] = "each"
    """How all microbatches of a step but the last one are run."""
    optimizer: str = "sgd"
    steps: int = 3
    set_to_none: bool = True
    by_unit: bool = False
    """Whether units are updated one by one, and gathered at once."""
    device: str = "cpu"

    def __str__(self) -> str:
        plain = Case(self.model)
        told = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join([str(self.model), *told])

    @property
    def kind(self) -> Kind:
        return ZOO[self.model] if isinstance(self.model, str) else self.model.kind

    @property
    def exact(self) -> bool:
        """Whether all sums have one order only."""
        # torch's fused kernel on CPUs rounds the end of a tensor otherwise than its middle.
        return (isinstance(self.model, str) or self.model.exact) and self.optimizer != "adamw_fused"

    @property
    def defers(self) -> Literal["nothing", "outer", "all"]:
        """What a microbatch that is not the step's last leaves to the last one."""
        if self.sync == "each":
            return "nothing"
        return "all" if self.sync == "no_sync" or self.strategy in ("no_shard", "optim") else "outer"

    def teams(self, world: int) -> list[list[int]]:
        """The ranks whose gradients are summed first, by position in the outer group."""
        inner = self.mesh[-1] if self.mesh and self.strategy != "no_shard" else world
        return [list(range(start, start + inner)) for start in range(0, world, inner)]


class Gradient:
    """The gradient of one parameter in the making."""

    def __init__(self, teams: list[list[int]], case: Case, compute: torch.dtype, divide: float) -> None:
        self.teams, self.scale = teams, 1.0 / divide
        self.wire = case.precision.get("wire") or compute
        self.accumulate = case.precision.get("accumulate", torch.float32)
        self.whole = case.strategy == "no_shard"
        """Whether all ranks get the sum, in the wire dtype."""
        self.forget()

    def forget(self) -> None:
        self.local: dict[int, Tensor] = {}
        self.partial: list[Tensor | None] = [None] * len(self.teams)
        self.total: Tensor | None = None

    def add(self, grads: Mapping[int, Tensor], defers: str) -> None:
        """Add one microbatch; `grads` by rank. Where the first sum is over one rank, it is never deferred."""
        if defers == "all" and len(self.teams[0]) > 1:
            for rank, grad in grads.items():
                self.local[rank] = _sum([self.local.get(rank), grad], self.accumulate)
            return
        sent = {rank: grad.to(self.wire) for rank, grad in grads.items()}
        for rank, before in self.local.items():
            sent[rank] = _sum([before, sent.get(rank)]).to(self.wire)
        self.local = {}
        for i, team in enumerate(self.teams if sent else []):
            total = _sum([sent[rank] for rank in team if rank in sent], self.accumulate)
            if self.whole and len(team) > 1:
                total = total.to(self.wire).to(self.accumulate)
            if self.scale != 1:
                total.mul_(self.scale)
            self.partial[i] = _sum([self.partial[i], total])
        if defers == "nothing" and any(part is not None for part in self.partial):
            self._add_outer()

    def _add_outer(self) -> None:
        """Replicas add up what they have, of which all but the first forget what was added before."""
        self.total = _sum(self.partial)
        self.partial = [self.total, *[None] * (len(self.teams) - 1)]


def _sum(parts: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Tensor:
    """From left to right, in a dtype."""
    first, *rest = [part for part in parts if part is not None]
    total = first.to(dtype or first.dtype, copy=True)
    for part in rest:
        total += part
    return total


def build(case: Case, expert: int = 0) -> nn.Module:
    """The model, with the same first values on all ranks, but for experts."""
    seed = torch.default_generator.manual_seed  # that of the CPU alone: torch.manual_seed takes longer than a model
    seed(0)
    module = case.kind.build()
    seed(100 + expert)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if ".experts." in name:
                param.uniform_(-0.3, 0.3)
    return module.to(case.device)


class Twin:
    """The unsharded model, trained on the data of all ranks."""

    def __init__(self, case: Case, world: int) -> None:
        self.case, self.world = case, world
        self.modules = [build(case, expert) for expert in range(case.experts)]
        for module in self.modules[1:]:
            for name, param in self.modules[0].named_parameters():
                if ".experts." not in name:
                    owner, _, key = name.rpartition(".")
                    setattr(module.get_submodule(owner), key, param)
        main_dtype = case.precision.get("main", torch.float32)
        self.main: dict[nn.Parameter, nn.Parameter] = {}
        self.gradients: dict[nn.Parameter, Gradient] = {}
        for expert, module in enumerate(self.modules):
            for name, param in module.named_parameters():
                if param not in self.main:
                    self.main[param] = nn.Parameter(param.detach().to(main_dtype, copy=True), param.requires_grad)
                    if param.requires_grad:
                        self.gradients[param] = self._gradient(name, param, expert)
                    param.data = self.main[param].detach().to(case.precision.get("compute") or param.dtype, copy=True)
        self.buffers = [{n: b.clone() for n, b in self.module(r).named_buffers()} for r in range(world)]
        self.optimizer = OPTIMIZERS[case.optimizer](list(self.main.values()))

    def _gradient(self, name: str, param: nn.Parameter, expert: int) -> Gradient:
        teams, compute = self.case.teams(self.world), self.case.precision.get("compute") or param.dtype
        if self.case.experts == 1 or ".experts." not in name:
            return Gradient(teams, self.case, compute, self.world)
        ranks = list(range(expert, self.world, self.case.experts))
        return Gradient([ranks], self.case, compute, self.world)

    def module(self, rank: int) -> nn.Module:
        return self.modules[rank % self.case.experts]

    def loss(self, rank: int, seed: int, step: int) -> Tensor:
        """Forward of one rank, with that rank's buffers."""
        module = self.module(rank)
        for name, buffer in module.named_buffers():
            buffer.copy_(self.buffers[rank][name])
        loss = forward(module, self.case, rank, seed, step)
        self.buffers[rank] = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return loss

    def microbatch(self, seed: int, step: int, defers: str) -> list[Tensor]:
        """Forward and backward of all ranks; their losses."""
        losses, found = [], {param: {} for param in self.gradients}
        for rank in range(self.world):
            loss = self.loss(rank, seed, step)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
            for param, grads in found.items():
                if param.grad is not None:
                    grads[rank] = param.grad
                param.grad = None
        for param, grads in found.items():
            self.gradients[param].add(grads, defers)
        return losses

    def step(self) -> None:
        for param, gradient in self.gradients.items():
            total = gradient.total
            self.main[param].grad = None if total is None else total.to(self.main[param].dtype)
            gradient.forget()
        self.optimizer.step()
        with torch.no_grad():
            for param, main in self.main.items():
                param.copy_(main)


def forward(module: nn.Module, case: Case, rank: int, seed: int, step: int) -> Tensor:
    """The loss of one microbatch of one rank."""
    x = batch(case.kind, 1000 * seed + rank).to(case.device)
    compute = case.precision.get("compute")
    if compute is not None and x.is_floating_point():
        x = x.to(compute)
    return loss_of(module(x, step))


class Pair:
    """This rank's part of a sharded model, and the twin."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world = case, rank, world
        self.twin = Twin(case, world)
        self.module: Any = build(case, rank % case.experts)
        self.ctx = shard(case, self.module, world)
        self.optimizer = OPTIMIZERS[case.optimizer](list(self.module.parameters()))
        self.steps = self.seed = 0
        # Sums of more than two replicas are the backend's affair: gloo's have another order, as have all of NCCL's.
        self.exact = case.exact and len(case.teams(world)) <= 2 and case.device == "cpu"

    def forward(self, seed: int | None = None) -> Tensor:
        """A microbatch of the sharded model alone, by default the next one."""
        return forward(self.module, self.case, self.rank, self.seed if seed is None else seed, self.steps)

    def expect(self, loss: Tensor, defers: str = "nothing", seed: int | None = None) -> None:
        """Compare the loss of a microbatch that the sharded model has done, forward and backward, with the twin's."""
        seed = self.seed if seed is None else seed
        wanted = self.twin.microbatch(seed, self.steps, defers)[self.rank]
        self.same(loss.detach(), wanted, f"loss of microbatch {seed} in step {self.steps}")
        self.seed = max(self.seed, seed + 1)

    def forget(self) -> None:
        """After an abort: the twin drops the gradients of the step so far, too."""
        for gradient in self.twin.gradients.values():
            gradient.forget()

    def microbatch(self, last: bool = True) -> None:
        """Forward and backward of both."""
        defers = "nothing" if last else self.case.defers
        with self.deferring(last):
            loss = self.forward()
            if loss.requires_grad:
                loss.backward()
        self.expect(loss, defers)

    def deferring(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or self.case.sync == "each":
            return contextlib.nullcontext()
        return self.ctx.no_sync() if self.case.sync == "no_sync" else self.ctx.accumulating()

    def evaluate(self) -> None:
        """Both forward without gradients."""
        with torch.no_grad():
            ours, wanted = self.forward(), self.twin.loss(self.rank, self.seed, self.steps)
        self.same(ours, wanted, f"validation loss in step {self.steps}")

    def step(self) -> None:
        """An optimizer step of both; then every weight of this rank's shards is compared."""
        if self.case.by_unit:
            hocket.sharding.step_and_gather(self.ctx, self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        self.twin.step()
        self.steps += 1
        self.compare()

    def compare(self) -> None:
        plain = self.twin.module(self.rank)
        for unit in self.ctx.units:
            for group in unit.groups:
                for shard in group.shards:
                    main = self.twin.main[plain.get_parameter(shard.full_name)]
                    self.same(local(shard), here(shard, main), f"{shard.full_name} after step {self.steps}")

    def compare_gathered(self) -> None:
        """Compare the full compute weights, and the buffers."""
        plain = self.twin.module(self.rank)
        with self.ctx.gathered():
            for name, param in plain.named_parameters():
                self.same(self.module.get_parameter(name), param, f"gathered {name}")
        for name, buffer in self.twin.buffers[self.rank].items():
            self.same(self.module.get_buffer(name), buffer, f"buffer {name}")

    def same(self, ours: Tensor, wanted: Tensor, what: str) -> None:
        ours, wanted = ours.detach(), wanted.detach()
        assert ours.shape == wanted.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(wanted.shape)}"
        assert ours.dtype == wanted.dtype, f"{what}: {ours.dtype}, not {wanted.dtype}"
        if not self.exact:
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")
        elif not torch.equal(ours, wanted):
            worst = (ours.double() - wanted.double()).abs().max()
            raise AssertionError(
                f"{what} differs by up to {worst:.3g}: {ours.flatten()[:4]} and {wanted.flatten()[:4]}"
            )

    def train(self) -> None:
        """All steps of the case."""
        for _ in range(self.case.steps):
            for i in range(self.case.microbatches):
                self.microbatch(last=i == self.case.microbatches - 1)
            self.step()
        self.compare_gathered()


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], device: str = "cpu") -> DeviceMesh:
    """A mesh, made once per process: every one costs process groups."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh(device, shape, mesh_dim_names=names)
    return _meshes[shape, names]


def shard(case: Case, module: nn.Module, world: int) -> Any:
    """Shard the module as the case says; the context."""
    place = None
    if case.experts > 1:
        experts = mesh_of((world // case.experts, case.experts), ("edp", "ep"), case.device)["edp"]

        def place(name: str, param: nn.Parameter) -> Placement | None:
            return Placement(mesh=experts, divide=float(world)) if ".experts." in name else None

    mesh = None
    if case.mesh is not None:
        mesh = mesh_of(case.mesh, ("shard",) if len(case.mesh) == 1 else ("replicate", "shard"), case.device)
    return hocket.fully_shard(
        module,
        units=case.kind.units,
        mesh=mesh,
        strategy=case.strategy,
        precision=Precision(**case.precision),
        place=place,
        options=hocket.ShardOptions(**case.options),
    )


@contextlib.contextmanager
def naming(case: object) -> Iterator[None]:
    """Say which case an error belongs to."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {case}")
        raise


def train_all(rank: int, cases: Sequence[Case]) -> int:
    """On one rank: train every case beside its twin. Returns how many."""
    for case in cases:
        with naming(case):
            Pair(case, rank, dist.get_world_size()).train()
    return len(cases)


def variants(case: Case, **lists: Sequence[Any]) -> list[Case]:
    """Cases that differ from `case` in one field each."""
    return [replace(case, **{name: value}) for name, values in lists.items() for value in values]
