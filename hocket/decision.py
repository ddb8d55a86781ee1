"""What the resolver says about a setting: what it became, who wanted that, why, and what would be otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hocket.config.rule import show

AUTOMATIC = "auto"
"""The source of what hocket chose because the configuration left it open."""

Choice = tuple[str, object, str | tuple[str, ...]]
"""Setting, value, reason or reasons: what becomes a decision."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice that hocket made, one request that it could not meet, or a remark on a setting without effect."""

    setting: str
    """Dotted name, such as `overlap.ep.merge`."""
    value: Any
    """What it became."""
    asked: Any = AUTOMATIC
    """What the configuration said: `auto` (or an empty text) where it left the choice open."""
    source: str = AUTOMATIC
    """Where `asked` came from, such as `run.toml:6` or `recipe tiny`; `auto` where the choice was left open."""
    reasons: tuple[str, ...]
    """Why, all of them."""
    effect: str = ""
    """What the step does now, where the reasons do not say that."""
    fix: str = ""
    """What would make `asked` possible, or give the setting an effect; empty if there is nothing to mend."""

    given_up: bool = False
    """Whether `asked` could not be met and the run goes on without it."""

    @property
    def reason(self) -> str:
        """All reasons as one text."""
        return "; ".join(self.reasons)

    @property
    def unmet(self) -> bool:
        """Whether something was asked for that did not happen."""
        return self.given_up or (self.asked not in (AUTOMATIC, "") and self.asked != self.value)

    @property
    def chosen(self) -> bool:
        """Whether hocket chose the value, rather than remarking on one."""
        return self.given_up or self.asked in (AUTOMATIC, "")

    def as_json(self) -> dict[str, Any]:
        """Every field, for machines."""
        return asdict(self) | {"reasons": list(self.reasons), "unmet": self.unmet}

    def __str__(self) -> str:
        asked = f" (asked for {show(self.asked)}: {self.source})" if self.unmet else ""
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{self.setting} = {show(self.value)}{asked}: {self.reason}{fix}"


EFFECTS: dict[tuple[str, Any], str] = {
    ("train.transport", "copy_engine"): "copies move what kernels would: they take no SM from compute",
    ("train.transport", "nccl"): "what is communicated runs in NCCL's kernels, which take a few SMs from compute",
    ("overlap.ep.merge", "on"): "the all-to-alls of one microbatch run under another's compute",
    ("overlap.ep.merge", "off"): "forwards and backwards run apart",
    ("overlap.ep.merge_ends", "on"): "two forwards, or two backwards, run as one at the ends of the step",
    ("overlap.ep.merge_ends", "off"): "the first forwards and the last backwards run alone",
    ("overlap.ep.copies", "per_expert"): "a token is sent once for each of its experts",
    ("overlap.ep.copies", "per_rank"): "a token is sent once for each rank that has some of its experts",
    ("overlap.cp.method", "gather"): "keys and values of all ranks are gathered while queries are made",
    ("overlap.cp.method", "heads"): "each rank attends with some heads in all tokens; queries and results travel too",
    ("overlap.defer_wgrad", "on"): "weight gradients are ops of their own, which can wait",
    ("overlap.defer_wgrad", "off"): "each weight gradient is computed beside its input gradient",
    ("overlap.pp.defer_layers", 0): "no weight gradient is put after a send",
    ("overlap.pp.defer_layers", -1): "all weight gradients of a chunk run after its send",
    ("overlap.dp.update", "next_step"): "the next step updates weights, beside its first gathers and forwards",
    ("overlap.dp.update", "end"): "a step ends with its update, and the next one begins with gathers",
    ("precision.gather", "fp8"): "weights are cast once a step and travel in fp8: the same bits with half the bytes",
    ("precision.gather", "bf16"): "weights travel in bf16 and are cast where they arrive",
    ("overlap.pp.defer_head", 0): "the head's weight gradient follows its input gradient",
    ("overlap.pp.defer_head", -1): "the head's weight gradients run at the end, while other ranks finish",
    ("overlap.dp.strategy", "no_shard"): "every rank keeps everything; gradients are summed once a step",
    ("overlap.dp.strategy", "optim"): "optimizer state is shared out; gradients are reduced once a step",
    ("overlap.dp.strategy", "optim_grads"): "gradients are shared out too, and reduced in every microbatch",
    ("overlap.dp.strategy", "optim_grads_params"): "weights are shared out too, and gathered for every use",
}
"""What a step does because of a setting, by setting and value; what speaks for itself is not here."""


def effect_of(setting: str, value: Any) -> str:
    """The sentence, or nothing."""
    return EFFECTS.get((setting, value), "")
