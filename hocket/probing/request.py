"""What is measured, and what came out. Both travel between processes as JSON. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hocket.program.simulate import Kind

Product = tuple[int, int, int]
"""Sizes of a matrix product: [m, k] times [k, n]."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every rank measures."""

    world: int
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["gloo", "nccl", "copy_engine", "copy_engine_gathers"] = "gloo"
    dtype: Literal["fp32", "bf16"] = "fp32"
    products: tuple[Product, ...] = ()
    transfers: tuple[tuple[Kind, int], ...] = ()
    """Kind of communication and bytes that one rank receives in it."""
    names: bool = False
    """Whether to record what a gather is made of on the device."""
    rates: bool = False
    """Whether to load each device for seconds, and time products, attention, kernels and copies."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Request:
        fields: dict[str, Any] = json.loads(text)
        fields["products"] = tuple((m, k, n) for m, k, n in fields["products"])
        fields["transfers"] = tuple((kind, size) for kind, size in fields["transfers"])
        return Request(**fields)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; times are seconds on the slowest rank."""

    products: Mapping[Product, float] = field(default_factory=dict)
    transfers: Mapping[tuple[Kind, int], float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Of everything that a gather ran on the device of rank 0."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Work per second on the slowest rank, all ranks at once."""

    def to_json(self) -> str:
        found = {"products": list(self.products.items()), "transfers": list(self.transfers.items())}
        return json.dumps({**found, "names": self.names, "rates": dict(self.rates)})

    @staticmethod
    def from_json(text: str) -> Measured:
        fields = json.loads(text)
        return Measured(
            products={(m, k, n): seconds for (m, k, n), seconds in fields["products"]},
            transfers={(kind, size): seconds for (kind, size), seconds in fields["transfers"]},
            names=tuple(fields["names"]),
            rates=fields["rates"],
        )
