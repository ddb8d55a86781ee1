"""Signs of a broken start: first values, or a learning rate, from which a model hardly learns."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hocket.config import ModelConfig

WATCHED = 10
"""Steps that are looked at."""
WORSE, FULL, JUMP = 1.0, 0.9, 3.0
"""Nats above a guess; share of the largest load; factor between gradient norms."""


class Start:
    """The first steps of a run that begins with new weights."""

    def __init__(self, model: ModelConfig) -> None:
        self._fix = "model.init = torchtitan, " if model.init == "gpt2" else ""
        self._guess = math.log(model.vocab)
        self._largest = model.experts / model.top_k if model.experts else math.inf
        self._calmest = math.inf
        self._said = set[str]()

    def warnings(self, step: int, loss: float, grad_norm: float, load: float) -> Iterator[str]:
        """What is wrong with a step, each once. `load` is the busiest expert's rows over the mean."""
        if step > WATCHED:
            return
        jumps, self._calmest = grad_norm > JUMP * self._calmest, min(self._calmest, grad_norm)
        signs = {
            f"the loss {loss:.2f} is above that of a guess, {self._guess:.2f}": loss > self._guess + WORSE,
            f"the busiest expert has {load:.1f} times the mean, of at most {self._largest:.1f}": (
                self._largest >= 4 and load >= FULL * self._largest
            ),
            f"the gradient's norm has jumped to {grad_norm:.3g}": jumps,
        }
        for text, wrong in signs.items():
            kind = text.split()[1]
            if wrong and kind not in self._said:
                self._said.add(kind)
                yield f"a bad start: {text}; fix: {self._fix}a lower train.lr or a longer train.warmup"
