"""Rows of cloned experts, divided between owners and clones when a routing has been made.

To those who move rows a clone is one more expert of its rank: each rank has L experts of its own, then C *seats* of
clones. So a routing with clones says of P * (L + C) places how many rows go there, in the place of E = P * L experts.
The first rows of an expert, in the order of tokens, go to its owner, the next ones to its first clone, and so on. See
`program/cloning.py` for which experts are cloned, and how many rows each clone gets.

Shapes: E global experts, P ranks, L local experts, C seats of a rank, N clones, R rows, A = E + N experts and clones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hocket.kernels.usable import usable
from hocket.parallel.routing import Routing
from hocket.program.cloning import Clones, divide, owner_of


@dataclass(frozen=True, eq=False)
class _Tables:
    """What a division of rows reads of the clones, int64, on the device."""

    expert_N: Tensor
    """The expert of each clone."""
    rank_N: Tensor
    """Where each clone is."""
    at_E: Tensor
    """Number of each expert among experts and clones, which stand by expert, the owner's first."""
    at_N: Tensor
    """Likewise of each clone."""
    place_A: Tensor
    """Place of each of these among all P * (L + C)."""


class ClonedExperts:
    """The clones of one layer's experts, as its routing needs them."""

    def __init__(self, experts: int, ranks: int, seats: int) -> None:
        self.experts, self.ranks, self.seats = experts, ranks, seats
        self.clones: Clones = ()
        self._tables: _Tables | None = None

    def choose(self, clones: Clones) -> None:
        """Divide rows among these clones from now on."""
        if clones != self.clones:
            self.clones, self._tables = clones, None

    def divided(self, routing: Routing) -> Routing:
        """The routing whose rows go to owners and clones."""
        counts_E = routing.counts_E
        if self._tables is None or self._tables.at_E.device != counts_E.device:
            self._tables = self._made(counts_E.device)
        told = self._tables
        given_N = self._given(counts_E, told)
        rows_A = counts_E.new_empty(len(told.place_A))
        rows_A[told.at_E] = counts_E.index_add(0, told.expert_N, given_N, alpha=-1)
        rows_A[told.at_N] = given_N
        ends_A = rows_A.cumsum(0)
        counts_V = counts_E.new_zeros(self.ranks * (self.experts // self.ranks + self.seats))
        counts_V[told.place_A] = rows_A
        first_V = counts_V.cumsum(0) - counts_V
        shift_A = first_V[told.place_A] - (ends_A - rows_A)
        here_R = torch.searchsorted(ends_A, routing.inverse_R.long(), right=True)
        inverse_R = routing.inverse_R + shift_A[here_R].to(torch.int32)
        return replace(routing, inverse_R=inverse_R, counts_E=counts_V, counted_E=routing.load_E)

    def _given(self, counts_E: Tensor, told: _Tables) -> Tensor:
        """Rows that each clone gets, int64 [N]."""
        if usable(counts_E) and self.clones:
            from hocket.kernels.clones import divide_rows

            return divide_rows(counts_E, told.expert_N, told.rank_N, self.ranks, self.ranks * self.seats)
        given = divide(counts_E.tolist(), self.clones, self.ranks)
        return torch.tensor(given, dtype=torch.int64, device=counts_E.device)

    def _made(self, device: torch.device) -> _Tables:
        local = self.experts // self.ranks
        by_expert: dict[int, list[int]] = {expert: [] for expert in range(self.experts)}
        for n, clone in enumerate(self.clones):
            by_expert[clone.expert].append(n)
        at_E, at_N, place_A = list[int](), [0] * len(self.clones), list[int]()
        for expert, mine in by_expert.items():
            owner = owner_of(expert, self.experts, self.ranks)
            at_E.append(len(place_A))
            place_A.append(owner * (local + self.seats) + expert % local)
            for n in mine:
                at_N[n] = len(place_A)
                place_A.append(self.clones[n].rank * (local + self.seats) + local + self.clones[n].seat)
        experts, ranks = [clone.expert for clone in self.clones], [clone.rank for clone in self.clones]
        tables = (experts, ranks, at_E, at_N, place_A)
        return _Tables(*(torch.tensor(each, dtype=torch.int64, device=device) for each in tables))
