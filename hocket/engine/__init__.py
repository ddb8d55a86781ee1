"""One rank of a planned run: what executes a program on GPUs, or on a CPU.

engine.py      `Engine`, which builds everything else; the trainer and benchmarks drive it
executor.py    the loop over a rank's ops
actions.py     what each op does to tensors
graphed.py     steps that are recorded once and replayed
experts.py     row capacity of experts, overflow, and balance biases
hang_report.py what each lane of a hung rank waits for
"""

from __future__ import annotations

from hocket.engine.engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]
