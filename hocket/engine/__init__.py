"""One rank of a planned run: what executes a program on GPUs, or on a CPU.

engine.py     `Engine`: all of it put together; the trainer and benchmarks drive it
executor.py   the loop over a rank's ops
actions.py    what each op does to tensors
graphed.py    steps that are recorded once and replayed
room.py       how many of experts' rows there is room for, and steps whose rows find none
balance.py    loads of experts, and the biases that they move
standstill.py what a rank tells of a step that stands still
"""

from __future__ import annotations

from hocket.engine.engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]
