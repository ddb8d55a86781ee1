"""One rank of a planned run: what executes a program on GPUs, or on a CPU.

engine.py     `Engine`: program, model, optimizer and executor put together; the trainer and benchmarks drive it
executor.py   the loop over a rank's ops
actions.py    what each op does to tensors
graphed.py    steps that are recorded once and replayed
"""

from __future__ import annotations

from hocket.engine.engine import DTYPES, Engine, StepResult, comm_options

__all__ = ["DTYPES", "Engine", "StepResult", "comm_options"]
