"""Do the peers run here, and do they compute what the plain stack computes?

    torchrun --nproc-per-node 2 -m benchmarks.peers_check [--jobs 3] [--seconds 60] [--compile] [NAME...]

Every peer gets a process of its own on every rank, so that one that crashes or hangs takes no other with it, and a few
of them run side by side. Each builds small dense and MoE models where it can, without and with a pipeline, and takes a
few steps on one batch; what it learns is compared, as the gate of `hocket bench` does, with what the plain stack learns
on one rank from the tokens of all. Rank 0 prints one line
per model and the end of every traceback; whole logs lie under `--out`. Exits with 1 if any peer failed.

The processes are forked before anything touches CUDA. Ranks of one host agree through files in a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hocket.bench import gate
from hocket.bench.contender import CONTENDERS, load, why_not
from hocket.bench.workload import Workload, batches
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PlanConfig, PrecisionConfig, TrainConfig
from hocket.environment import MULTICAST_OFF
from hocket.launch import die_with
from hocket.presets import PLAIN
from hocket.settings.leaves import changed

STEPS, GRACE = 6, 5.0
"""Steps of each model; seconds in which other ranks may fail too once one has."""
MICROBATCHES, LAYERS = 4, 4


def models(gpu: bool) -> dict[str, ModelConfig]:
    sizes: dict[str, Any] = dict(vocab=61, hidden=32, layers=LAYERS, heads=4, kv_heads=2, head_dim=8, ffn=64)
    width = 16
    if gpu:
        sizes |= dict(vocab=4096, hidden=1024, heads=8, kv_heads=4, head_dim=128, ffn=2048)
        width = 512
    experts: dict[str, Any] = dict(experts=8, top_k=2, expert_ffn=width, shared_ffn=width, aux_loss=0.01)
    return {"dense": ModelConfig(**sizes), "moe": ModelConfig(**sizes, **experts)}


def meshes(world: int) -> dict[str, MeshConfig]:
    """The meshes that are tried, by what follows the model's name."""
    found = {"": MeshConfig(dp=world), " ep": MeshConfig(dp=world, ep=world)}
    if world % 2 == 0:
        half = world // 2
        found |= {" pp": MeshConfig(pp=2, dp=half), " pp ep": MeshConfig(pp=2, dp=half, ep=half)}
    return found


def workloads(name: str, world: int, gpu: bool, compiled: bool) -> dict[str, Workload]:
    """What one contender can run, by name. Experts stay on one rank only if it cannot spread them."""
    train = TrainConfig(
        microbatches=MICROBATCHES, sequences=2, device="cuda" if gpu else "cpu",
        transport="nccl" if gpu else "gloo", clip=0.0,
    )  # fmt: skip
    plan = PlanConfig(chunks=2, order="interleaved")
    found = {}
    for model, sizes in models(gpu).items():
        for suffix, mesh in meshes(world).items():
            if suffix.endswith("ep") and (model == "dense" or mesh.ep == 1):
                continue
            config = Config(
                model=sizes,
                mesh=mesh,
                plan=plan if mesh.pp > 1 else dataclasses.replace(plan, chunks=1, order="sequential"),
                precision=PrecisionConfig(compute="bf16" if gpu else "fp32"),
                data=DataConfig(sequence_length=256 if gpu else 8),
                train=train,
            )
            config = changed(config, PLAIN)
            if not why_not(name, config):
                found[model + suffix] = gate.gentle(Workload(config, compile=compiled))
    for case in [case for case in found if case.startswith("moe") and f"{case} ep" in found]:
        del found[case]
    return found


# --------------------------------------------------------------------------------------------------- one peer, one rank


def plain_losses(work: Workload, device: torch.device) -> list[float]:
    """Mean losses of the plain stack, on this rank alone, over the tokens of all data-parallel ranks."""
    mesh, config = work.mesh, work.config
    train = dataclasses.replace(config.train, microbatches=mesh.dp * MICROBATCHES)
    alone = Workload(dataclasses.replace(config, mesh=MeshConfig(), train=train))
    contender = load("bound")(alone, 0, device)
    microbatches = [one for dp in range(mesh.dp) for one in batches(work, dp, 0, device)]
    losses = [float(contender.step(microbatches)) for _ in range(STEPS)]
    contender.close()
    return losses


def run_case(name: str, work: Workload, rank: int, device: torch.device) -> dict[str, Any]:
    """A few steps of one contender. Every rank calls this."""
    wanted = plain_losses(work, device)
    contender = load(name)(work, rank, device)
    start = time.perf_counter()
    losses = gate.curve(contender, work, rank, device, STEPS)
    seconds = (time.perf_counter() - start) / STEPS
    settings = dict(contender.settings)
    contender.close()
    found = {"losses": losses, "plain": wanted, "ms": 1e3 * seconds, "settings": settings}
    try:
        return {"outcome": "ok", "apart": gate.judge({"the plain stack": wanted, name: losses}, work).worst, **found}
    except gate.NumericsError as error:
        return {"outcome": "DIFFERS", "error": str(error), **found}


def without_optimizer(name: str, work: Workload, rank: int, device: torch.device) -> dict[str, Any]:
    """Two steps that only compute gradients."""
    contender = load(name)(dataclasses.replace(work, optimizer=False), rank, device)
    microbatches = batches(work, rank, 0, device)
    losses = [float(contender.step(microbatches)) for _ in range(2)]
    contender.close()
    same = abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[0])
    return {"outcome": "ok" if same else "CHANGES", "losses": losses}


def run_peer(name: str, options: argparse.Namespace, rank: int, world: int, folder: Path) -> bool:
    """Everything about one peer, in a process of its own. Returns whether all went well."""
    gpu = options.gpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / f"{name}.store"), world)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    limit = timedelta(seconds=options.seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    results: dict[str, Any] = {}
    cases = workloads(name, world, gpu, options.compile)
    tasks = [(case, run_case, work) for case, work in cases.items()]
    tasks += [(f"{case}, no optimizer", without_optimizer, work) for case, work in list(cases.items())[:1]]
    for case, function, work in tasks:
        print(f"--- {name}: {case}", flush=True)
        try:
            results[case] = function(name, work, rank, device)
        except Exception as error:  # the others go on: all ranks fail together, or the parent ends them
            traceback.print_exc()
            results[case] = {"outcome": "FAILED", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(results[case]), flush=True)
        (folder / f"{name}.rank{rank}.json").write_text(json.dumps(results))
        if results[case]["outcome"] == "FAILED":
            break  # what it left behind could make the next one fail or hang
    return all(result["outcome"] == "ok" for result in results.values()) and bool(results)


# -------------------------------------------------------------------------------------------------------- all of a rank


@dataclass
class Child:
    """The process of one peer on this rank."""

    name: str
    pid: int
    deadline: float
    started: float = field(default_factory=time.monotonic)


def start(name: str, options: argparse.Namespace, rank: int, world: int, folder: Path) -> Child:
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        os.setsid()
        die_with(parent)
        log = os.open(folder / f"{name}.rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        end(lambda: run_peer(name, options, rank, world, folder))
    return Child(name, pid, time.monotonic() + options.seconds)


def end(work: Callable[[], bool]) -> NoReturn:
    """Do this process's work and end it at once: libraries may hang in their own shutdown."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        code = 0 if work() else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def finish(child: Child, rank: int, folder: Path) -> str:
    """How a child ended: ok, failed or killed; empty while it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        good = os.waitstatus_to_exitcode(status) == 0
        if not good:
            blame(child.name, rank, folder)
        return "ok" if good else "failed"
    if (folder / f"{child.name}.failed").exists():  # on another rank: this one would wait for it in vain
        child.deadline = min(child.deadline, time.monotonic() + GRACE)
    if time.monotonic() < child.deadline:
        return ""
    blame(child.name, rank, folder)
    os.kill(child.pid, signal.SIGUSR1)  # so that its log says where it was
    time.sleep(0.5)
    os.killpg(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    return "killed"


def blame(name: str, rank: int, folder: Path) -> None:
    """Note which rank failed first."""
    with contextlib.suppress(FileExistsError), (folder / f"{name}.failed").open("x") as file:
        file.write(str(rank))


def shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


def report(name: str, outcome: str, seconds: float, folder: Path) -> None:
    """Print what a peer did on this rank."""
    path = folder / f"{name}.rank0.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    print(f"{name:28} {outcome:7} {seconds:5.1f} s")
    for case, result in results.items():
        what = f"{result['ms']:8.1f} ms  {result['apart']:.1e} apart  " if "apart" in result else ""
        what += result.get("error") or f"losses {shown(result['losses'])}"
        print(f"    {case:22} {result['outcome']:8} {what}")
    if outcome != "ok":
        first = (folder / f"{name}.failed").read_text()
        lines = (folder / f"{name}.rank{first}.log").read_text(errors="replace").splitlines()
        print(f"    rank {first} failed first:")
        print("".join(f"    | {line}\n" for line in lines[-30:]), end="")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=3, help="peers that run at the same time")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one peer")
    parser.add_argument("--compile", action="store_true", help="compile layers; slower to start")
    parser.add_argument("--cpu", dest="gpu", action="store_false", help="on CPUs with gloo")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "peers_check")
    options = parser.parse_args()
    for variable, value in MULTICAST_OFF.items():
        os.environ[variable] = value
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    known = {n: entry for n, entry in CONTENDERS.items() if entry.package or n.startswith("pipelining")}
    peers = [n for n, entry in known.items() if options.gpu or not entry.cuda]
    folder: Path = options.out / str(os.getppid())  # torchrun's: the same for all ranks, another one each time
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running, bad = list(options.names or peers), [], []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(start(waiting.pop(0), options, rank, world, folder))
        for child in list(running):
            outcome = finish(child, rank, folder)
            if outcome:
                running.remove(child)
                bad += [child.name] if outcome != "ok" else []
                if rank == 0:
                    report(child.name, outcome, time.monotonic() - child.started, folder)
        time.sleep(0.1)
    if rank == 0:
        print(f"failed: {', '.join(bad) or 'none'}; logs in {folder}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
