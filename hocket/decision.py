"""The resolver's decision about a setting: the value, what was asked for, the reasons, and a fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hocket.config.rule import show

AUTOMATIC = "auto"
"""The source of a value that hocket chose because the configuration left it open."""

Choice = tuple[str, object, str | tuple[str, ...]]
"""Setting, value, and one or several reasons, from which a decision is made."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice that hocket made, one request that it could not meet, or a remark on a setting without effect."""

    setting: str
    """Dotted name, such as `overlap.ep.merge`."""
    value: Any
    """The resulting value."""
    asked: Any = AUTOMATIC
    """The configured value: `auto` (or an empty text) if the configuration left the choice open."""
    source: str = AUTOMATIC
    """Where `asked` was set, such as `run.toml:6` or `recipe tiny`; `auto` if the choice was left open."""
    reasons: tuple[str, ...]
    """All reasons."""
    fix: str = ""
    """What would make `asked` possible, or give the setting an effect; empty if nothing needs fixing."""

    given_up: bool = False
    """Whether `asked` could not be met and the run goes on without it."""

    @property
    def reason(self) -> str:
        """All reasons as one text."""
        return "; ".join(self.reasons)

    @property
    def unmet(self) -> bool:
        """Whether a request was not met."""
        return self.given_up or (self.asked not in (AUTOMATIC, "") and self.asked != self.value)

    @property
    def chosen(self) -> bool:
        """Whether hocket chose the value; false for a remark."""
        return self.given_up or self.asked in (AUTOMATIC, "")

    def as_json(self) -> dict[str, Any]:
        """Every field, as JSON values."""
        return asdict(self) | {"reasons": list(self.reasons), "unmet": self.unmet}

    def __str__(self) -> str:
        asked = f" (asked for {show(self.asked)}: {self.source})" if self.unmet else ""
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{self.setting} = {show(self.value)}{asked}: {self.reason}{fix}"
