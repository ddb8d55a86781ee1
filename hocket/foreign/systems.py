"""The systems that hocket understands."""

from __future__ import annotations

from collections.abc import Callable

from hocket.foreign.deepspeed import DEEPSPEED
from hocket.foreign.megatron import BRIDGE, MEGATRON
from hocket.foreign.read import Pairs, file, flags, flags_or_file, keys
from hocket.foreign.torchtitan import TORCHTITAN
from hocket.foreign.translate import System

__all__ = ["BRIDGE", "DEEPSPEED", "MEGATRON", "SYSTEMS", "TORCHTITAN"]

SYSTEMS: dict[str, tuple[System, Callable[[str], Pairs]]] = {
    "megatron": (MEGATRON, flags),
    "bridge": (BRIDGE, keys),
    "torchtitan": (TORCHTITAN, flags_or_file),
    "deepspeed": (DEEPSPEED, file),
}
"""By the word behind `--from-`, with the way to read what follows it."""
