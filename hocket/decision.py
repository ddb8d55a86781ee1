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
