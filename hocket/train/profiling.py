"""A window of steps recorded with the profiler, every op under its name in the plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hocket.runtime.executor import Executor


class ProfileWindow:
    """Records the steps `first .. first + count - 1` of a run, counted from 1; `window` empty records nothing."""

    def __init__(self, window: tuple[int, ...], folder: Path, rank: int, executor: Executor) -> None:
        self._first, self._last = (window[0], sum(window) - 1) if window else (0, 0)
        self._path = folder / "traces" / f"rank{rank}.json.gz"
        self._executor = executor
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Call before step `step`."""
        if step == self._first and self._last:
            self._executor.annotate()
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profiler.start()

    def after(self, step: int) -> Path | None:
        """Call after step `step`. Returns the trace's path once it is written."""
        if self._profiler is None or step != self._last:
            return None
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
        return self._path
