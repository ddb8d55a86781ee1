"""Configurations for tests, with settings of plan and overlap under short names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.config import Config, ModelConfig
from hocket.config.schema import changed, types
from hocket.program.connect import known_done
from hocket.program.ops import LANES, Lane, Op
from hocket.program.pipeline import Step

NAMES = {name.rsplit(".", 1)[-1]: name for name in types() if name.startswith(("plan.", "overlap."))}
"""Last part of a name -> the name. Where two end alike, only dotted names will do."""


def planned(config: Config | None = None, /, **settings: Any) -> Config:
    """A configuration with some settings of `plan` and `overlap` by the last part of their names, as `merge="off"`."""
    return changed(config or Config(), {NAMES[name]: value for name, value in settings.items()})


def known_of(ops: Sequence[Op]) -> dict[Lane, list[int]]:
    """For every lane and op of a rank, the latest position on that lane that is known to be done when the op runs."""
    lanes, deps = [op.lane for op in ops], [op.deps for op in ops]
    return {lane: known_done(lanes, deps, lane) for lane in LANES}


def merged_share(steps: Sequence[Step]) -> float:
    """Share of a rank's forwards that run merged."""
    return sum(len(step.forwards) for step in steps if step.merged) / sum(len(step.forwards) for step in steps)


def small(**changes: Any) -> ModelConfig:
    """A model of which a step takes milliseconds: four experts in each layer that is not made dense."""
    sizes: dict[str, Any] = dict(
        vocab=31, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, expert_ffn=16, experts=4, top_k=2
    )
    return ModelConfig(**{**sizes, **changes})
