"""The systems that hocket understands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hocket.foreign.deepspeed import DEEPSPEED
from hocket.foreign.megatron import BRIDGE, MEGATRON
from hocket.foreign.read import Pairs, file, flags_or_file, keys, with_files
from hocket.foreign.torchtitan import CONFIG_FILES, TORCHTITAN
from hocket.foreign.translate import System

__all__ = ["BRIDGE", "DEEPSPEED", "MEGATRON", "SYSTEMS", "TORCHTITAN"]

SYSTEMS: dict[str, tuple[System, Callable[[str], Pairs]]] = {
    "megatron": (MEGATRON, flags_or_file),
    "bridge": (BRIDGE, keys),
    "torchtitan": (TORCHTITAN, partial(with_files, names=CONFIG_FILES)),
    "deepspeed": (DEEPSPEED, file),
}
"""By the word behind `--from-`, with the way to read what follows it."""
