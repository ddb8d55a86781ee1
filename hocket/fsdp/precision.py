"""In which number formats a sharded module keeps, computes, sends and adds up."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Precision:
    """Four separate choices. Parameters that aren't floating-point numbers stay as they are."""

    main: torch.dtype | None = torch.float32
    """What the optimizer updates: the shards that `module.parameters()` yields; None is the dtype in which the module
    was built."""
    compute: torch.dtype | None = None
    """What is gathered and computed with; None is the dtype in which the module was built."""
    wire: torch.dtype | None = None
    """In which gradients are sent; None is the compute dtype."""
    accumulate: torch.dtype | None = torch.float32
    """In which the gradients of microbatches are added up, and of ranks, but for NCCL's own sum of ranks: in `wire`.
    None is the finer one of the wire and main dtypes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if value not in FORMATS:
                choices = "torch.float32, torch.bfloat16, torch.float16 or torch.float64"
                raise ValueError(f"Precision({field.name}={value!r}) is no dtype to train in: use {choices}, or None")

    def of(self, dtype: torch.dtype) -> Formats:
        """What becomes of parameters that were built in `dtype`."""
        if not dtype.is_floating_point:
            return Formats(dtype, dtype, dtype, dtype)
        main, compute = self.main or dtype, self.compute or dtype
        wire = self.wire or compute
        return Formats(main, compute, wire, self.accumulate or torch.promote_types(wire, main))


@dataclass(frozen=True)
class Formats:
    """The four dtypes of one group of parameters, every default resolved."""

    main: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    accumulate: torch.dtype
