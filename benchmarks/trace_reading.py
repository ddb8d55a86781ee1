"""Time and memory of reading a profiler trace and reporting on it, against the size of the file.

    python -m benchmarks.trace_reading

The traces are made up, in the mix of a real one of training on a GPU: a quarter of the events are kernels and their
launches, a quarter arrows between them, and the rest ops and annotations of the host. Each size runs in a fresh
process on one core. The targets for a file of 100 MB are 10 s and 2 GiB. Writes `benchmarks/results/trace_reading.json`
and prints a table.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fresh import answer, in_fresh_process, options, peak_mib
from hocket_trace import load, report

SIZES = (10, 25, 50, 100, 200)
"""Megabytes of JSON."""
TARGET = 100
STEPS = 4

GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
ADD = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, "
    "3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAYERS = 32


def unit(number: int, at: float) -> Iterator[dict[str, Any]]:
    """One op of a plan: its annotation, the ops in it, two kernels, and a collective before every fourth."""
    yield event("user_annotation", f"fwd attn m0 c0 l{number % LAYERS}", at, 90, 100, number)
    for i, (op, name) in enumerate((("aten::mm", GEMM), ("aten::add", ADD))):
        start, correlation = at + 10 + 30 * i, 10 * number + i
        yield event("cpu_op", f"autograd::engine::evaluate_function: {op}Backward0", start, 25, 100, number)
        yield event("cpu_op", "aten::matmul" if i == 0 else "aten::add_", start + 1, 20, 100, number)
        yield event("cpu_op", op, start + 2, 15, 100, number)
        yield from launched(correlation, name, start + 5, at + 200 + 45 * i, 40, 7)
    if number % 4 == 0:
        about = {
            "Collective name": "_allgather_base", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 23, "Group size": 8,
            "dtype": "BFloat16", "Process Group Name": "1", "Process Group Description": "gather_dense",
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        }  # fmt: skip
        yield {**event("cpu_op", "record_param_comms", at + 70, 15, 100, number), "args": about}
        yield event("user_annotation", "nccl:_all_gather_base", at + 72, 10, 100, number)
        yield from launched(10 * number + 9, NCCL, at + 75, at + 210, 120, 20, **about)


PLAN = {
    "lanes": ["compute"],
    "computing": ["compute"],
    "ops": {f"fwd attn m0 c0 l{layer}": ["compute", "compute", "", layer] for layer in range(LAYERS)},
}
"""What the trace tells about its ops."""


def event(cat: str, name: str, ts: float, dur: float, tid: int, number: int) -> dict[str, Any]:
    args = {"External id": number, "Record function id": 0, "Ev Idx": number}
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(
    correlation: int, name: str, at: float, start: float, dur: float, stream: int, **more: Any
) -> Iterator[dict[str, Any]]:
    """A launch, its kernel, and the arrows between them."""
    args = {
        "External id": correlation, "queued": 0, "device": 0, "context": 1, "stream": stream,
        "correlation": correlation, "registers per thread": 96, "shared memory": 103808, "blocks per SM": 0.121212,
        "grid": [16, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 0, **more,
    }  # fmt: skip
    call = {"cbid": 652, "correlation": correlation}
    yield {**event("cuda_runtime", "cudaLaunchKernelExC", at, 4, 100, correlation), "args": call}
    yield {**event("kernel", name, start, dur, stream, correlation), "pid": 0, "args": args}
    for phase, tid, ts in (("s", 100, at), ("f", stream, start)):
        arrow = {"ph": phase, "id": correlation, "pid": 0, "tid": tid, "ts": ts, "cat": "ac2g", "name": "ac2g"}
        yield {**arrow, "bp": "e"} if phase == "f" else arrow


def write_trace(path: Path, megabytes: float) -> int:
    """Write a trace of about that size. Returns the number of its events."""
    sample = [json.dumps(e) for number in range(400) for e in unit(number, 5e12 + 100.0 * number)]
    units = max(4, int(megabytes * 1e6 / sum(len(text) + 2 for text in sample) * 400))
    group = {"pg_name": "1", "pg_desc": "gather_dense", "ranks": list(range(8))}
    head = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "baseTimeNanoseconds": 10**18,
        "hocket": {"plan": PLAN},
        "distributedInfo": {"rank": 0, "world_size": 8, "pg_config": [group]},
    }  # fmt: skip
    length, count = 100.0 * units / STEPS, STEPS
    with path.open("w") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        marks = (event("user_annotation", f"hocket step {n}", 5e12 + n * length, length, 100, n) for n in range(STEPS))
        file.write(",\n".join(json.dumps(mark) for mark in marks))
        for number in range(units):
            texts = [json.dumps(e) for e in unit(number, 5e12 + 100.0 * number)]
            count += len(texts)
            file.write("".join(f",\n{text}" for text in texts))
        file.write("\n]}\n")
    return count


def measure(path: Path, repeats: int) -> dict[str, float]:
    """Shortest of `repeats` times in seconds of CPU time, and the peak memory of the process in MiB."""
    before = peak_mib()
    read_s = report_s = float("inf")
    rows = 0
    for _ in range(repeats):
        start = time.process_time()
        traces = load([path])
        read = time.process_time()
        found = report(traces)
        done = time.process_time()
        assert len(found.steps) == STEPS
        read_s, report_s, rows = min(read_s, read - start), min(report_s, done - read), len(traces[0])
    return {"kernels": rows, "read_s": read_s, "report_s": report_s, "peak_mib": peak_mib(), "start_mib": before}


def main() -> None:
    told = options(__doc__)
    if told.one:
        answer(lambda: measure(Path(told.one), told.repeats))
        return
    from benchmarks.record import write  # imports torch, which the measured processes don't

    rows: list[dict[str, Any]] = []
    print(f"{'MB':>6} {'events':>10} {'kernels':>9} {'read s':>8} {'report s':>9} {'MiB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            path = Path(folder) / "trace.json"
            events = write_trace(path, size)
            megabytes = path.stat().st_size / 1e6
            found = in_fresh_process("benchmarks.trace_reading", str(path), told.repeats)
            rows.append({"size": size, "mb": megabytes, "events": events, **{k: round(v, 4) for k, v in found.items()}})
            row = rows[-1]
            print(
                f"{megabytes:>6.1f} {events:>10,} {row['kernels']:>9,.0f} {row['read_s']:>8.2f} "
                f"{row['report_s']:>9.2f} {row['peak_mib']:>6.0f}"
            )
    target = next(row for row in rows if row["size"] == TARGET)
    seconds = target["read_s"] + target["report_s"]
    print(f"{TARGET} MB: {seconds:.2f} s of 10 s, {target['peak_mib']:.0f} MiB of 2048 MiB")
    result = {
        "question": "How do time and memory of reading a trace and reporting on it grow with its size?",
        "method": f"shortest of {told.repeats} CPU times on one core, one process per size; plain JSON",
        "target": {"mb": TARGET, "seconds": 10, "mib": 2048},
        "rows": rows,
    }
    print(write("trace_reading", result, told.out, told.commit))


if __name__ == "__main__":
    main()
