"""How the groups of a configuration are made."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hocket.config import Config
from hocket.parallel.tensor import ways_of
from hocket.plan.capacity import rows_allowed
from hocket.plan.copies import copies_of
from hocket.plan.stages import layout_of
from hocket.runtime.comm import CommOptions, Link
from hocket.runtime.lanes import spinner
from hocket.runtime.recorder import MARGIN

_HOP = 64 << 20
"""Most bytes that wait at an edge of a pipeline for their receiver."""
_SLACK = 1.25
"""Rows that one round of an exchange has room for, as a multiple of an even load: none is ever quite even."""


def comm_options(config: Config, device: torch.device) -> CommOptions:
    """How long groups wait, how much comes at once, how late a slow one is. `config` is resolved."""
    train, model, size, layout = config.train, config.model, config.element_bytes, layout_of(config)
    copies = copies_of(model, config.mesh.ep, layout.per_rank, size)
    rows, width = math.ceil(_SLACK * config.tokens * copies.count), model.hidden * size
    if layout.placed:
        rows = max(rows, rows_allowed(config))
    arrival = rows * (width + copies.label * size)  # of one microbatch, in one round
    timeout = train.hang_timeout + MARGIN
    piecewise = any(way.piecewise for way in ways_of(config).values())
    tokens = train.sequences * config.data.sequence_length * width if piecewise else 0
    hop = min(config.tokens * width, _HOP)
    options = CommOptions(timeout, arrival=arrival, tokens=tokens, hop=hop, device_splits=layout.placed)
    if train.transport != "slow":
        return options
    links = {purpose: Link(*numbers) for purpose, numbers in train.slow_links().items()}
    spin = spinner(device) if device.type == "cuda" else None
    return replace(options, tokens=0, links=links, spin=spin)  # copy engines know no imitated network
