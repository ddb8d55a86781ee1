"""Settings and values that one may look for in vain, and why there are none: for messages."""

from __future__ import annotations

from typing import Any

from hocket.sizes import WITH_UNITS

ABSENT: dict[str, str] = {
    "precision.main": "main weights are fp32, or small updates would be lost",
    "precision.accumulate": "gradients at rest are fp32",
    "precision.router": "the router computes in fp32: a close choice must not flip by rounding",
    "precision.loss": "the loss is computed in fp32",
    "overlap.dp.bucket": "in a plan what is gathered and reduced as one is a layer; fully_shard has buckets of a size",
    "overlap.dp.align": "the plan issues a gather ahead of its reader on every stage, so none waits for another's",
    "overlap.pp.batch": "sends are never batched: each has a lane of its own, and waits for no other",
    "overlap.tp.sms": "copy engines move pieces, and what NCCL moves has a bound of SMs by what the group is for",
}
"""Name -> why there is no such setting."""

_FORMATS = {
    "fp8": "products run in fp8 with precision.compute, weights travel in it with precision.gather, and tokens with "
    "precision.dispatch",
    "fp4": "there are no products in fp4",
    "fp16": "bf16 has the range of fp32, so that no loss needs a scale",
}
"""Beginning of a number format that `precision` does not know -> why."""


def why_no(setting: str) -> str:
    """Why there is no setting of that name; empty if nothing is known of it."""
    return ABSENT.get(setting, "")


def why_not(setting: str, value: Any) -> str:
    """Why a setting cannot have that value, where there is more to say than its type; else empty."""
    if setting in WITH_UNITS and isinstance(value, int | float):
        return f'has no unit, as "{WITH_UNITS[setting][1]}" has'
    said = str(value).lower().replace("float", "fp").replace("mxfp", "fp")
    known = next((why for start, why in _FORMATS.items() if said.startswith(start)), "")
    return known if setting.startswith("precision.") else ""
