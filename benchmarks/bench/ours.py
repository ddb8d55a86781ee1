"""hocket's own contenders: the planned step in several orders, and the same program without communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from benchmarks.bench.contender import Contender, Resting
from benchmarks.bench.plain import optimizer_name
from benchmarks.bench.workload import Workload
from hocket.config import Config
from hocket.config.schema import changed, flat
from hocket.engine import Engine
from hocket.engine.engine import comm_options
from hocket.model.documents import Microbatch
from hocket.predict.arrivals import overflow_note
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.program.mesh import Mesh
from hocket.program.stages import layout_of, mesh_of
from hocket.runtime.comm import Group, Groups, RowTable, TransportName, make_groups
from hocket.runtime.transports import Null, Pending, Transport

_groups: dict[tuple[Mesh, str, str, str, int], Groups] = {}
"""Groups of this process by mesh, transport, who knows splits, copies, and tokens of a microbatch, for which they have
room: contenders of one kind take turns on them, as they do on the GPU."""


_lenders: WeakValueDictionary[int, Planned] = WeakValueDictionary()
"""hocket as configured, by the identity of its workload: without an optimizer, its bound can use the same weights."""


@dataclasses.dataclass
class Signal(Null):
    """p2p transfers that carry an element each: a receiver waits until its sender is there, and for nothing else.

    With it between pipeline ranks, and `Null` elsewhere, a step has the bubble of its order and no communication.
    """

    inner: Transport

    def send(self, tensor: Tensor, to: int) -> Pending:
        return self.inner.send(tensor.view(-1)[:1], to)

    def recv(self, tensor: Tensor, source: int) -> Pending:
        self._fill(tensor)
        return self.inner.recv(tensor.view(-1)[:1], source)


class Planned:
    """An engine as a contender."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, config: Config) -> None:
        self.workload = workload
        transport = config.train.transport
        kind = mesh_of(config), transport, config.overlap.ep.splits, config.overlap.ep.copies, config.tokens
        self.engine = Engine(config, rank, device, groups=_groups.get(kind), update=workload.optimizer)
        _groups[kind] = self.engine.groups
        self.engine.init_weights()
        self.lr = config.train.lr
        said = {
            name: ", ".join(f"{setting} = {value}" for setting, value in flat(dataclasses.asdict(section)).items())
            for name, section in (("plan", config.plan), ("overlap", config.overlap), ("precision", config.precision))
        }
        whole = config.overlap.dp.strategy == "no_shard"
        self.twice = 0  # steps
        self.settings: dict[str, str] = {
            **said,
            "transport": transport,
            "weights": "fp32 and the compute dtype, whole" if whole else "fp32 shards, cast by each gather",
            "compile": "off: hocket runs eagerly",
            "reduce": f"{config.precision.wire}, {'summed in' if transport == 'copy_engine' else 'added to'} fp32",
            "optimizer": optimizer_name(workload, "on what is fp32", kernel=True),
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        result = self.engine.train_step(microbatches, self.lr)
        if result.lacked:
            self.twice += 1
            self.settings["steps"] = f"{self.twice} {overflow_note(self.engine.config, result.lacked, result.grown)}"
        return result.loss

    def rest(self) -> None:
        """Give back the memory of a graph, which is recorded anew in the next step."""
        self.engine.forget_graph()

    def close(self) -> None:
        self.engine.forget_graph()
        del self.engine


class Muted:
    """Another contender, whose groups only pretend while it steps. Weights must not be updated.

    `p2p transfers` are groups whose members wait for each other all the same.
    """

    def __init__(
        self, lender: Contender, groups: Iterable[Group], device: torch.device, p2p: Iterable[Group] = ()
    ) -> None:
        self.lender = lender
        self.pretending: list[tuple[Group, Transport]] = [
            (group, Null(group.size, group.rank, device)) for group in groups if group.size > 1
        ]
        self.pretending += [(group, Signal(group.size, group.rank, device, group.transport)) for group in p2p]
        waits = "p2p transfers carry an element each, all else is null" if p2p else "null"
        self.settings: Mapping[str, str] = {
            **lender.settings,
            "transport": f"{waits}; weights and memory are those of another contender, which has the other settings",
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        moved_by = [group.transport for group, _ in self.pretending]
        for group, transport in self.pretending:
            group.transport = transport
        try:
            return self.lender.step(microbatches)
        finally:
            for (group, _), transport in zip(self.pretending, moved_by, strict=True):
                group.transport = transport

    def rest(self) -> None:
        if isinstance(self.lender, Resting):
            self.lender.rest()

    def close(self) -> None:
        del self.lender, self.pretending


def planned(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Hocket as configured. A bound can use the same weights."""
    made = _lenders[id(workload)] = Planned(workload, rank, device, workload.config)
    return made


def zigzag(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Hocket whose context-parallel ranks have the chunks of whole sequences, whatever documents there are."""
    made = Planned(workload, rank, device, workload.config)
    assert made.engine.shared is not None, "there are ranks that share sequences"
    made.engine.shared.even = None
    made.settings["chunks"] = "zigzag"
    return made


def null(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Hocket as configured, without communication: a step's bound. Its losses mean nothing."""
    lender = _lenders.get(id(workload))
    if lender is not None and lender.workload is workload and not workload.optimizer:
        return Muted(lender, lender.engine.groups, device)
    return Planned(workload, rank, device, _on(workload.config, "null"))


def signal(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Hocket as configured, without communication, but waiting for the pipeline: the bound of its order."""
    lender = _lenders.get(id(workload))
    if lender is None or lender.workload is not workload or workload.optimizer:
        raise ValueError(
            "against = hocket_signal (command line): runs on the weights of hocket, which it must not change; "
            "fix: --against hocket,hocket_signal --optimizer off"
        )
    groups = lender.engine.groups
    p2p = list({id(p2p): p2p for p2p in groups.edges()}.values())
    real = [*p2p, groups.control]  # ranks that wait for each other agree on whether a step is made again
    return Muted(lender, [group for group in groups if group not in real], device, p2p)


class Exchanges:
    """The rows' exchanges of a step, one after the other and evenly routed, with nothing beside them.

    They are on copy engines where there are any, else on the transport of the configuration.
    """

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        config = changed(workload.config, {"overlap.ep.splits": "host"})
        config = _on(config, "copy_engine") if device.type == "cuda" else config
        mesh, transport = mesh_of(config), config.train.transport
        assert transport != "auto", "the configuration is not resolved"
        kind = mesh, transport, config.overlap.ep.splits, config.overlap.ep.copies, config.tokens
        if kind not in _groups:
            _groups[kind] = make_groups(mesh, rank, device, transport, comm_options(config, device))
        self.group = _groups[kind].a2a
        size, width, where = mesh.ep, config.model.hidden, mesh.coordinates(rank)
        costs, layout = costs_of(config, hardware_of(config)).table, layout_of(config)
        routed = [kind for kind in layout.kinds if kind.startswith("moe")]
        sent = sum(costs["fwd", part, routed[0]].wire_bytes for part in ("dispatch", "combine")) // 2
        rows = sent // ((size - 1) * width * workload.dtype.itemsize)
        self.table = RowTable([[rows] * size] * size, self.group.rank)
        self.rows = torch.randn(size * rows, width, device=device).to(workload.dtype)
        layers = [layer for chunk in range(layout.chunks) for layer in layout.layers(where.pp, chunk)]
        moe = sum(layout.kinds[layer] in routed for layer in layers)
        self.count = 4 * moe * config.train.microbatches  # out and back, in forward and in backward
        self.settings: Mapping[str, str] = {
            "exchanges": f"{self.count}, of {rows:,} rows to each of {size - 1} ranks",
            "transport": transport,
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        for _ in range(self.count):
            out = torch.empty_like(self.rows)
            self.group.all_to_all(out, self.rows, self.table).wait()
        return torch.zeros((), device=self.rows.device)

    def close(self) -> None:
        del self.rows


def exchanges(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The exchanges of rows alone: the bound of a step that communicates for longer than it computes."""
    return Exchanges(workload, rank, device)


def _on(config: Config, transport: TransportName) -> Config:
    """A configuration on another transport."""
    return changed(config, {"train.transport": transport})
