"""One rank of a planned run: what executes a program on GPUs, or on a CPU.

engine.py     `Engine`: all of it put together; the trainer and benchmarks drive it
executor.py   the loop over a rank's ops
actions.py    what each op does to tensors
graphed.py    steps that are recorded once and replayed
experts.py    room for experts' rows, steps whose rows find none, and the biases that loads move
standstill.py what a rank tells of a step that stands still
"""

from __future__ import annotations

from hocket.engine.engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]
