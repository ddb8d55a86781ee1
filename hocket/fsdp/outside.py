"""Weights that are read while their unit's forward does not run.

Inside of a forward of the model, by another module: the unit stays gathered until all backwards of this time are over.

By `unshard()` of a module: until `reshard()`, the end of the module's next forward, or until weights change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from hocket.fsdp.module_unit import Claim, Unit


class Outside:
    """The claims on units of a model for reads outside of their forwards."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._held: list[Claim] = []
        self._unsharded: dict[Unit, Claim] = {}

    def hold(self, claim: Claim) -> None:
        """Keep a claim until all backwards of this time are over."""
        self._held.append(claim)

    def unshard(self, unit: Unit) -> Claim:
        """Keep the unit's weights gathered and shown by its modules."""
        if unit not in self._unsharded:
            self._unsharded[unit] = unit.acquire()
        return self._unsharded[unit]

    def reshard(self, unit: Unit) -> None:
        """End `unshard`."""
        if unit in self._unsharded:
            self._unsharded.pop(unit).release()

    def drop(self) -> None:
        """Give up weights that were read inside of a forward, unless a backward is still to come.

        Not at the end of a backward: the same graph may run once more, before a step or another forward.
        Which one reads them can't be told: while one forward holds the unit, others read its weights without asking.
        """
        if any(unit.open for unit in self._units):
            return
        claims, self._held = self._held, []
        for claim in claims:
            claim.release()

    def weights_changed(self) -> None:
        """No backward comes any more for what was computed with the old weights."""
        for unit in list(self._unsharded):
            self.reshard(unit)
        self.drop()

    def clear(self) -> None:
        """Forget all claims, which an abort has ended."""
        self._held.clear()
        self._unsharded.clear()


_CALLS = {nn.Module._call_impl.__code__}


def called_by_hand() -> bool:
    """Whether the caller runs inside of a forward of some module, whose weights it then reads."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in _CALLS or (code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)):
            return True
        frame = frame.f_back
    return False
