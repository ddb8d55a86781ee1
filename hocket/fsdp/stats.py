"""What the units of a sharded model have done and what they take: `ShardContext.stats()`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hocket.fsdp.buffers import StagingMemory
from hocket.fsdp.module_unit import Unit


@dataclass(frozen=True)
class ShardStats:
    """Counters since the start, and sizes in bytes."""

    gathers: int
    reduces: int
    surprises: int
    """How often a unit was needed that was not expected next; its gather is then exposed."""
    exceeded: int
    """How often more units were in use together than the prefetch allows for."""
    shard_bytes: int
    """Weights and gradients that this rank keeps."""
    full_bytes: int
    """Gathered weights at this moment."""
    staging_bytes: int
    """Gradients on their way, at most so far."""


def stats_of(units: Sequence[Unit], staging: Collection[StagingMemory], surprises: int, exceeded: int) -> ShardStats:
    """The statistics of some units."""
    return ShardStats(
        gathers=sum(unit.gathers for unit in units),
        reduces=sum(unit.reduces for unit in units),
        surprises=surprises,
        exceeded=exceeded,
        shard_bytes=sum(group.nbytes for unit in units for group in unit.groups),
        full_bytes=sum(b.nbytes for unit in units for b in unit.full.values() if b.allocated),
        staging_bytes=sum(one.nbytes for one in staging),
    )
