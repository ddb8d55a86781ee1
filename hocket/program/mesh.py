"""The grid of ranks: each rank's coordinates, and the members of every group.

Global rank = `((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank`. Tensor-parallel ranks communicate within every
layer. They are neighbours, so that they stay within a host if possible. Ranks with the same position in their tp groups
are like the ranks of a run without tensor parallelism. Context-parallel ranks have tokens of the same sequences; for
everything but attention they are data-parallel ranks.

To experts, context- and tensor-parallel ranks are data-parallel ranks. Between layers each of the dp * cp * tp ranks of
a pipeline rank has its own tokens: `(dp_rank * cp + cp_rank) * tp + tp_rank = edp_rank * ep + ep_rank`. Expert-parallel
ranks are neighbours, too; they may be a part of a tp group, or span several. This is the "parallel folding" of Liu et
al. 2025 ("MoE Parallel Folding", Megatron-LM with experts that are not split over tensor ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hocket.config import COPIED, MeshConfig, Purpose, Steps

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""All purposes, in the order in which every rank creates their groups."""

P2P: tuple[Purpose, ...] = ("pp_fwd", "pp_bwd")
"""Groups of two pipeline neighbours: the first rank sends activations, the second sends gradients back."""

HALF = 64 << 20
"""Bytes of a half, a staging buffer of copy engines for gathers or reductions; each has two."""
SMS = 16
"""Most SMs of one NCCL collective."""
TP_SMS = 24
"""Most SMs of one tensor-parallel collective; most of these do not overlap with compute."""
P2P_SMS = 4
"""Most SMs of one pipeline send or receive."""

Mover = Literal["nothing", "gloo", "nccl", "copies", "pieces", "kernels"]
"""What moves a group's bytes. `copies`: copy engines, whole tensors; `pieces`: copy engines, pieces of tokens;
`kernels`: kernels that store rows into peer memory."""


def mover_of(purpose: Purpose, transport: str, on_gpu: bool, device_splits: bool, by_pieces: bool) -> Mover:
    """What moves the bytes of a purpose's groups under a transport.

    `device_splits`: the host does not know row counts. `by_pieces`: some layer moves tokens in pieces.
    """
    if transport == "null":
        return "nothing"
    if not (transport == "nccl" or transport in COPIED or (transport == "slow" and on_gpu)):
        return "gloo"
    if purpose == "a2a" and device_splits:
        return "kernels"
    if purpose == "tp" and by_pieces:
        return "pieces"
    return "copies" if purpose in COPIED.get(transport, ()) else "nccl"


def groups_of(unit: str) -> tuple[Purpose, Purpose]:
    """The purposes of a unit's groups: the one that gathers its weights, and the one that reduces its gradients."""
    return ("gather_experts", "reduce_experts") if unit == "experts" else ("gather_dense", "reduce_dense")


def most_sms(purpose: Purpose) -> int:
    """Most SMs that NCCL uses for one call on a group."""
    return P2P_SMS if purpose in P2P else TP_SMS if purpose == "tp" else SMS


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinate on each axis."""

    pp: int
    dp: int
    edp: int
    ep: int
    tp: int = 0
    cp: int = 0


@dataclass(frozen=True, kw_only=True)
class Mesh(MeshConfig):
    """All ranks of a run, their coordinates and groups; `edp = dp * cp * tp / ep`.

    Activations go around a ring of pipeline ranks; with `turning`, to the last rank and back. With fewer key and value
    heads than tensor-parallel ranks, `sharing` neighbours have the same heads.
    """

    turning: bool = False
    sharing: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "ep", "tp", "cp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} must be at least 1, got {getattr(self, axis)}")
        row, others = self.data * self.tp, f" x mesh.cp={self.cp}" if self.cp > 1 else ""
        if row % self.ep:
            choices = ", ".join(str(n) for n in range(1, row + 1) if row % n == 0)
            raise ValueError(
                f"mesh.ep={self.ep} does not divide mesh.dp={self.dp}{others} x mesh.tp={self.tp}: expert-parallel "
                f"ranks are ranks of one pipeline rank, so ep must be one of {choices}"
            )
        if self.data % (self.shard or self.data) or self.shard * self.tp % self.ep:
            raise ValueError(
                f"mesh.shard={self.shard} must divide mesh.dp={self.dp}{others}, and mesh.ep={self.ep} must divide "
                f"mesh.shard x mesh.tp={self.shard * self.tp}"
            )

    @property
    def edp(self) -> int:
        return self.data * self.tp // self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank."""
        if not 0 <= rank < self.world:
            others = "".join(f" x {a}={n}" for a, n in (("cp", self.cp), ("tp", self.tp)) if n > 1)
            axes = f"pp={self.pp} x dp={self.dp}{others}"
            raise ValueError(f"rank {rank} is outside the mesh: {axes} has ranks 0..{self.world - 1}")
        pp, place = divmod(rank, self.data * self.tp)
        edp, ep = divmod(place, self.ep)
        data, tp = divmod(place, self.tp)
        dp, cp = divmod(data, self.cp)
        return Coordinates(pp, dp, edp, ep, tp, cp)

    def rank(self, pp: int, dp: int, tp: int = 0, cp: int = 0) -> int:
        """Global rank of coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of pipeline ranks; the first sends activations to the second."""
        if self.turning:
            along = [(p, p + 1) for p in range(self.pp - 1)]
            return (*along, *((q, p) for p, q in along))
        return tuple((p, (p + 1) % self.pp) for p in range(self.pp)) if self.pp > 1 else ()

    def goes_back(self, ranks: tuple[int, ...]) -> bool:
        """Whether a pipeline group lists its ranks in descending order, for chunks after the turn."""
        sender, receiver = (self.coordinates(rank).pp for rank in ranks)
        return self.turning and receiver < sender

    def groups(self, purpose: Purpose) -> tuple[tuple[int, ...], ...]:
        """The members (global ranks) of every group of one purpose, in order of creation.

        Pipeline groups are (r, next of r) for every edge, the sender of activations first: around the ring, or along
        the ranks and back. With pp = 2 the two edges join the same two ranks and stay distinct groups; with pp = 1
        there is none.
        """
        if purpose in P2P:
            row = self.data * self.tp
            return tuple((p * row + place, q * row + place) for p, q in self.edges for place in range(row))
        members, firsts = self.grid(purpose)
        others = sums(members)
        return tuple(tuple(first + other for other in others) for first in sums(firsts))


def sums(steps: Steps) -> list[int]:
    """Ranks that are sums of multiples, in order."""
    ranks = [0]
    for count, stride in steps:
        ranks = [rank + i * stride for rank in ranks for i in range(count)]
    return ranks


def described(m: MeshConfig) -> str:
    """The mesh as text, such as `pp 1 x dp 4 x tp 2, ep 8 inside dp x tp, weights shared by 2`."""
    others = [(name, ranks) for name, ranks in (("cp", m.cp), ("tp", m.tp)) if ranks > 1]
    shared = f", weights shared by {m.shard}" if m.replicas > 1 else ""
    axes, within = "".join(f" x {name} {ranks}" for name, ranks in others), "".join(f" x {name}" for name, _ in others)
    return f"pp {m.pp} x dp {m.dp}{axes}, ep {m.ep} inside dp{within}{shared}"
