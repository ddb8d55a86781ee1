"""How the groups of a configuration are made."""

from __future__ import annotations

from dataclasses import replace

import torch

from hocket.config import Config
from hocket.program.stages import layout_of
from hocket.runtime.comm import CommOptions, Link
from hocket.runtime.lanes import spinner
from hocket.runtime.recorder import MARGIN
from hocket.settings.arrivals import p2p_bytes, rows_bytes, tokens_bytes


def comm_options(config: Config, device: torch.device) -> CommOptions:
    """How long groups wait, how much comes at once, how late a slow one is. `config` is resolved."""
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
    return replace(options, tokens=0, links=links, spin=spin)  # copy engines know no imitated network
