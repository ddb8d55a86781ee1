"""Bounds and forms of settings, as annotations of their fields: `lr: Annotated[float, Between(1e-30, 1e30)]`.

Numbers that set the size of tables and plans have a largest value. So a mistyped number is an error at once, instead of
a process that is silent for minutes. All are far above the largest known models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ANY = float("inf")
WIDE = 2**20
"""Largest width of a layer."""
MANY = 2**16
"""Largest number of parts and passes."""
LONG = 2**27
"""Largest number of things that have a row in a layer."""
MOST_RANKS = 10**6
"""Largest number of ranks of a mesh, and of each of its axes."""


@dataclass(frozen=True)
class Between:
    """Smallest and largest value of a number. In a tuple they hold for each member."""

    low: float
    """The smallest."""
    high: float = ANY
    """The largest; no infinity, even without one."""


@dataclass(frozen=True)
class Form:
    """The form of a text, or of each text of a tuple."""

    read: Callable[[str], object]
    """Raises ValueError, with the reason, for a text of another form."""
    example: str
    """A text of this form, for messages."""
    auto: bool = True
    """Whether it may be `auto`, too, which is not read."""

    @property
    def words(self) -> str:
        """What to give, for messages."""
        return f"auto, or such as {self.example}" if self.auto else f"such as {self.example}"


@dataclass(frozen=True)
class OnlyWith:
    """What a setting needs to have an effect: without it, one that the user set is refused (`settings/rules.py`)."""

    what: str
    """Such as `mesh.pp above 1 and overlap.defer_wgrad = on`, or a key of `rules.FACTS`. It is the fix, too."""
    idle: tuple[object, ...] = ()
    """Values that ask for nothing, which may be set anywhere."""
    remark: bool = False
    """Whether to say that it has no effect is enough: scripts for all kinds of runs set it."""


FILLED = "filled"
"""Marks a text, or texts, that must not be empty."""
