"""Builds small Kineto traces by hand: the JSON that the profiler of torch writes, event by event.

    path = (
        Trace(rank=0, world=2)
        .group("gather_dense", (0, 1))
        .annotation("hocket step 1", 0, 100)
        .kernel("nvjet_sm90", 10, 30, op="aten::mm", plan_op="fwd attn m0 c0 l1")
        .collective("_allgather_base", "gather_dense", 20, 50, launched=5, sent=512, received=1024)
        .write(tmp_path / "rank0.json.gz")
    )

Times are microseconds from the trace's own zero. A kernel is launched when it starts, if `launched` says nothing else.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

MAIN = 100
"""The host thread that ops run on if no other is named."""
PLANNED = re.compile(r"(fwd|bwd|wgrad|send|recv|gather|reduce|step|update|release) [a-z]+( [a-z]\d+)*$")
"""Annotations that are taken for named ops. The trace tells what they are as a run of hocket would."""
LANES = (
    "compute", "a2a", "send_act", "recv_act", "send_grad", "recv_grad", "send_act_back", "send_grad_back", "gather",
    "reduce", "update",
)  # fmt: skip
BASE_NS = 1_700_000_000_000_000_000


def plan(names: Iterable[str], tensors: bool = False) -> dict[str, Any]:
    """What a run of hocket tells about ops of these names; with `tensors`, those that compute communicate inside."""
    ops = {name: planned(name, tensors) for name in names}
    return {"lanes": list(LANES), "computing": ["compute", "update"], "ops": ops}


def planned(name: str, tensors: bool = False) -> list[Any]:
    """Lane, kind, group and layer of an op such as `fwd attn m0 c1 l5`."""
    verb, part = name.split()[:2]
    layer = next((int(word[1:]) for word in name.split()[2:] if word[0] == "l"), -1)
    if verb in ("gather", "reduce"):
        return [verb, verb, f"{verb}_{'experts' if part == 'experts' else 'dense'}", layer]
    if verb in ("send", "recv"):
        return [f"{verb}_{part}", "pp", "pp_fwd" if part == "act" else "pp_bwd", layer]
    if part in ("dispatch", "combine"):
        return ["a2a", "a2a", "a2a", layer]
    inside = ("tp", "tp") if tensors else ("compute", "")
    return ["compute", *(("control", "") if verb == "step" else inside), layer]


class Trace:
    """A trace in the making; every method but `document` and `write` returns the trace itself."""

    def __init__(
        self, rank: int = 0, world: int = 1, *, device: str = "NVIDIA H200", zero: float = 5e9, host: str = ""
    ) -> None:
        """`zero` is what the file calls microsecond 0. An empty `device` makes a trace of a CPU."""
        self.rank, self.world, self.zero = rank, world, zero
        self.events: list[dict[str, Any]] = []
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.top: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}] if device else [],
            "baseTimeNanoseconds": BASE_NS,
        }
        if host:
            self.top["host_name"] = host
        self.tensors = False
        """Whether ops that compute communicate inside."""
        self._external = 0
        self._correlation = 0

    def group(self, description: str, ranks: Sequence[int], name: str = "") -> Self:
        """A process group; `name` is the number that torch gives it, by default counted from 1."""
        self.groups[description] = (name or str(len(self.groups) + 1), tuple(ranks))
        return self

    def metadata(self, **values: Any) -> Self:
        """Further top-level keys, such as `hocket=...`."""
        self.top.update(values)
        return self

    def event(self, cat: str, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> Self:
        """Any complete event."""
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else 1000
        span = {"ts": round(self.zero + start, 3), "dur": round(end - start, 3)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **span, "args": args})
        return self

    def annotation(self, name: str, start: float, end: float, thread: int = MAIN) -> Self:
        self._external += 1
        return self.event("user_annotation", name, start, end, thread, **{"External id": self._external})

    def op(self, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> Self:
        self._external += 1
        return self.event("cpu_op", name, start, end, thread, **{"External id": self._external}, **args)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        stream: int = 7,
        launched: float | None = None,
        thread: int = MAIN,
        **more: Any,
    ) -> Self:
        """A kernel and its launch.

        `more`: `op`, a torch op put around the launch; `plan_op`, an annotation put around that; `cat`, such as
        `gpu_memcpy`; `linked=False` leaves the launch away; all else goes into the kernel's args.
        """
        at = start if launched is None else launched
        args = {key: value for key, value in more.items() if key not in ("op", "plan_op", "cat", "linked")}
        args |= {"device": 0, "stream": stream}
        if more.get("linked", True):
            self._correlation += 1
            args["correlation"] = self._correlation
            if more.get("plan_op"):
                self.annotation(more["plan_op"], at - 0.3, at + 0.3, thread)
            if more.get("op"):
                self.op(more["op"], at - 0.2, at + 0.2, thread)
            self.event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, thread, correlation=self._correlation)
        return self.event(more.get("cat", "kernel"), name, start, end, stream, **args)

    def collective(
        self,
        name: str,
        group: str,
        start: float,
        end: float,
        *,
        sent: int = 0,
        received: int = 0,
        dtype: str = "BFloat16",
        **more: Any,
    ) -> Self:
        """An NCCL kernel with what torch says about its collective; `more` goes to `kernel`.

        `sent` and `received` are numbers of elements. Streams are 20 and up, one per group.
        """
        number, ranks = self.groups[group]
        about: dict[str, Any] = {
            "Collective name": name,
            "In msg nelems": sent,
            "Out msg nelems": received,
            "Group size": len(ranks),
            "dtype": dtype,
            "Process Group Name": number,
            "Process Group Description": group,
            "Process Group Ranks": str(list(ranks)),
        }
        settings: dict[str, Any] = {"stream": 19 + int(number), "op": f"nccl:{name}", **about, **more}
        kernel = {"send": "SendRecv", "recv": "SendRecv", "all_to_allv": "SendRecv"}.get(name, name.strip("_"))
        return self.kernel(f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)", start, end, **settings)

    def peer_copy(self, start: float, end: float, bytes: int, stream: int = 30, **more: Any) -> Self:
        """A transfer to another GPU by the copy engine."""
        return self.kernel(
            "Memcpy PtoP (Device -> Device)", start, end, stream=stream, cat="gpu_memcpy", bytes=bytes, **more
        )

    def gloo(self, name: str, op: str, start: float, end: float, launched: float, thread: int = 200) -> Self:
        """A transfer of gloo, such as `all_to_all`, and the op that asked for it, such as `c10d::alltoall_base_`."""
        self.op(op, launched, launched + 0.5)
        return self.annotation(f"gloo:{name}", start, end, thread)

    def document(self) -> dict[str, Any]:
        groups = [
            {"pg_name": number, "pg_desc": description, "pg_size": len(ranks), "ranks": list(ranks)}
            for description, (number, ranks) in self.groups.items()
        ]
        about: Mapping[str, Any] = {"rank": self.rank, "world_size": self.world, "pg_config": groups}
        top, marks = self.top, [e["name"].removeprefix("wait ") for e in self.events if e["cat"] == "user_annotation"]
        if names := [name for name in dict.fromkeys(marks) if PLANNED.match(name)]:
            top = {**top, "hocket": {"plan": plan(names, self.tensors), **top.get("hocket", {})}}
        return {**top, "distributedInfo": about, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        """Write the trace; a name that ends in .gz is compressed."""
        data = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
