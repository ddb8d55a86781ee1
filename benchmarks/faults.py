"""Does a run survive? Random kills and faults of processes, disk, text, cache, checkpoints and network, one command.

    python -m benchmarks.faults                    # all kinds, four times each
    python -m benchmarks.faults --each 1 --kinds "a rank is killed" "a checkpoint is cut off"

A small run of two ranks on CPUs is trained once undisturbed, for each mesh. Then each trial trains it again in a folder
of its own, with a fault at a random moment, drawn from the seed and the number of the trial.

    survived   it ends, by itself or with the same command once more, with the undisturbed run's losses and weights, bit
               for bit
    told       it ends with a line that says why, and a fix, and ends as above once the fault is mended; or, where the
               text has changed, it goes on and says so
    lost       anything else: other bits, a hang, an end without such a line, a command that cannot go on
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.faulty_runs import (
    EVERY,
    LIMIT,
    PLAIN,
    RANKS,
    STEPS,
    UNDER_TORCHRUN,
    WAYS,
    WORDS,
    Link,
    Run,
    Trial,
    Way,
    mount,
    unmount,
    why_no_disk,
    why_no_link,
    words_with,
)
from benchmarks.markdown import Result, table
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.environment import prepare
from hocket.fsdp.saving.atomic_folder import checksum

ENDS = 30.0
"""Seconds in which both sides of a cut link end, behind the limit."""
OUTCOMES = ("tried", "survived", "told", "lost")


# Faults. Each returns the run that is to go on with it.


def kill_rank(trial: Trial) -> Run:
    run = trial.begun()
    ranks = run.ranks()
    if ranks:
        os.kill(trial.chance.choice(ranks), signal.SIGKILL)
    return run


def stop_rank(trial: Trial) -> Run:
    run = trial.begun()
    ranks = run.ranks()
    if ranks:
        os.kill(trial.chance.choice(ranks), signal.SIGSTOP)
    return run


def kill_launcher(trial: Trial) -> Run:
    trial.begun().kill()
    return trial.start()


def kill_all(trial: Trial) -> Run:
    run = trial.begun()
    for pid in [run.pid, *run.ranks()]:
        os.kill(pid, signal.SIGKILL)
    run.end()
    return trial.start()


def short_writes(trial: Trial) -> Run:
    """Files of one rank, or of all, can be no longer than some bytes for a while: as on a full disk."""
    run = trial.begun()
    few = trial.chance.choice([0, 100, 10_000])
    ranks = run.ranks()
    limited = ranks[: trial.chance.choice([1, RANKS])]
    _limit(limited, few)
    time.sleep(0.2 + 0.6 * trial.chance.random())
    _limit(limited, resource.RLIM_INFINITY)
    return run


def _limit(ranks: list[int], few: int) -> None:
    for rank in ranks:
        try:
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (few, resource.RLIM_INFINITY))
        except ProcessLookupError:
            return


def full_disk(trial: Trial) -> Run:
    """A small file system is full, but for some bytes, for a while or until somebody makes room."""
    place = trial.folder / "runs"
    mount(place)
    trial.close = partial(unmount, place)
    run, filler = trial.begun(), place / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - trial.chance.choice([0, 4096, 100_000])))
    if trial.chance.random() < 0.5:
        trial.mend = partial(filler.unlink, missing_ok=True)
    else:
        time.sleep(0.2 + 0.6 * trial.chance.random())
        filler.unlink()
    return run


def no_folder(trial: Trial) -> Run:
    """The folder of checkpoints can be neither read nor written for a while, and is back as it was then."""
    run = trial.begun()
    folder = trial.folder / "runs/run/checkpoints"
    ranks = run.ranks()
    _signal(ranks, signal.SIGSTOP)
    folder.rename(folder.with_name("away"))
    folder.symlink_to("/dev/null/x")
    _signal(ranks, signal.SIGCONT)
    done = trial.lines()
    run.until(lambda: trial.lines() > done + EVERY)
    _signal(run.ranks(), signal.SIGSTOP)
    folder.unlink()
    folder.with_name("away").rename(folder)
    _signal(run.ranks(), signal.SIGCONT)
    return run


def _signal(ranks: list[int], number: int) -> None:
    for rank in ranks:
        try:
            os.kill(rank, number)
        except ProcessLookupError:
            continue


def damaged(choose: Callable[[Trial], list[Path]], how: Callable[[Trial, Path], None]) -> Callable[[Trial], Run]:
    """A fault between two starts: one of some files is damaged, and put back when the run has been refused."""

    def fault(trial: Trial) -> Run:
        trial.begun().kill()
        file = trial.some(choose(trial))
        kept = file.read_bytes()
        how(trial, file)
        trial.mend = lambda: file.write_bytes(kept)
        return trial.start()

    return fault


def flip(trial: Trial, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[trial.chance.randrange(len(content))] ^= 1 << trial.chance.randrange(8)
    file.write_bytes(content)


def cut(trial: Trial, file: Path) -> None:
    os.truncate(file, trial.chance.randrange(file.stat().st_size))


def remove(trial: Trial, file: Path) -> None:
    file.unlink()


def change(trial: Trial, file: Path) -> None:
    """Other words, as many."""
    file.write_text(file.read_text().replace("document", "somewhat"))


def every_checkpoint(trial: Trial) -> Run:
    """No checkpoint is left whole."""
    trial.begun().kill()
    files = [trial.some(list(path.glob("*.distcp"))) for path in trial.newest()]
    kept = [file.read_bytes() for file in files]
    for file in files:
        trial.chance.choice([flip, cut, remove])(trial, file)
    trial.mend = lambda: [file.write_bytes(content) for file, content in zip(files, kept, strict=True)]
    return trial.start()


def _newest_files(trial: Trial) -> list[Path]:
    return [path for path in trial.newest()[0].iterdir() if path.is_file()]


def _newest_tensors(trial: Trial) -> list[Path]:
    return list(trial.newest()[0].glob("*.distcp"))


def _cache(trial: Trial) -> list[Path]:
    return [path for path in (trial.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size]


def _text(trial: Trial) -> list[Path]:
    return list((trial.folder / "text").iterdir())


# Faults of a link between two ranks, each with a network of its own.


def cut_link(trial: Trial, link: Link, ranks: list[Run]) -> None:
    link.put("down", trial.chance.randrange(RANKS))


def kill_host(trial: Trial, link: Link, ranks: list[Run]) -> None:
    """Nothing says farewell to the other side, as when a host loses its power, and its memory."""
    side = trial.chance.randrange(RANKS)
    link.put("down", side)
    ranks[side].kill()


def on_link(fault: Callable[[Trial, Link, list[Run]], None], trial: Trial, whole: Any) -> tuple[str, str]:
    """A fault at a random moment, which ends all ranks in time; then the same two start again. The verdict."""
    link, port = Link(), trial.chance.randrange(20_000, 30_000)
    try:
        ranks, step = link.start(trial.folder, port), trial.chance.randrange(EVERY + 1, STEPS - EVERY)
        if early := trial.chance.random() < 0.3:  # while ranks meet, or make groups
            ranks[0].until(lambda: bool(ranks[0].text))
        else:
            ranks[0].until(lambda: trial.lines() >= step)
        time.sleep((4.0 if early else 0.05) * trial.chance.random())
        fault(trial, link, ranks)
        since, left = time.monotonic(), [rank for rank in ranks if rank.code is None]
        codes = [rank.end() for rank in left]
        seconds = time.monotonic() - since
        told = "\n".join(rank.text for rank in ranks)
        if seconds > LIMIT + ENDS or -signal.SIGKILL in codes:
            return "lost", f"sides ended with {codes} after {seconds:.0f} s: {told}"
        if any(codes) and not all(rank.one_line() for rank, code in zip(left, codes, strict=True) if code):
            return "lost", f"no one line: {told}"
        for side in range(RANKS):
            link.put("up", side)
        again = link.start(trial.folder, port + 1)
        codes = [rank.end() for rank in again]
        same = outcome(trial.folder) == whole
        return ("told", "") if same else ("lost", f"{codes}: {told} {again[0].text} {again[1].text}")
    finally:
        link.close()


def on_a_bad_link(trial: Trial, whole: Any) -> tuple[str, str]:
    """A whole run whose packets are late, and some of them lost. The verdict."""
    link = Link()
    try:
        link.worsen()
        ranks = link.start(trial.folder, trial.chance.randrange(20_000, 30_000))
        codes = [rank.end() for rank in ranks]
        same = outcome(trial.folder) == whole
        return ("survived", "") if same else ("lost", f"{codes}: {ranks[0].text} {ranks[1].text}")
    finally:
        link.close()


FULL, TORCHRUN_KILLED = "a file system is full", "torchrun is killed"
_USUAL: dict[str, Callable[[Trial], Run]] = {
    "a rank is killed": kill_rank,
    "a rank stands still": stop_rank,
    "the launcher is killed": kill_launcher,
    "all processes are killed": kill_all,
    "files end early: a full disk": short_writes,
    FULL: full_disk,
    "the folder of checkpoints is gone": no_folder,
    "a checkpoint is cut off": damaged(_newest_files, cut),
    "a bit of a checkpoint flips": damaged(_newest_files, flip),
    "a rank's file is missing": damaged(_newest_tensors, remove),
    "no checkpoint is whole": every_checkpoint,
    "a bit of the cache flips": damaged(_cache, flip),
    "the cache is cut off": damaged(_cache, cut),
    "a text changes": damaged(_text, change),
    "a text is cut off": damaged(_text, cut),
}
FAULTS: dict[str, tuple[Way, Callable[[Trial], Run]]] = {
    **{kind: (PLAIN, fault) for kind, fault in _USUAL.items()},
    **{f"a rank is killed, {how}": (way, kill_rank) for how, way in WAYS.items()},
    "a rank stands still, under torchrun": (UNDER_TORCHRUN, stop_rank),
    TORCHRUN_KILLED: (UNDER_TORCHRUN, kill_launcher),
}
LINK, HOST, BAD_LINK = "a link is cut", "a host is gone, with its memory", "a link is slow and loses packets"
LINKS: dict[str, Callable[[Trial, Any], tuple[str, str]]] = {
    LINK: partial(on_link, cut_link),
    HOST: partial(on_link, kill_host),
    BAD_LINK: on_a_bad_link,
}
KINDS = (*FAULTS, *LINKS)


def outcome(folder: Path) -> Any:
    """Losses by step, and checksums of the last checkpoint's tensors; None if the run is not complete."""
    last = folder / f"runs/run/checkpoints/step-{STEPS:08d}/meta.json"
    if not last.exists():
        return None
    lines = map(json.loads, (folder / "runs/run/metrics.jsonl").read_text().splitlines())
    tensors = sorted((file.name, checksum(file)) for file in last.parent.glob("*.distcp"))
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line], tensors


def judged(trial: Trial, run: Run, whole: Any) -> tuple[str, str]:
    """What became of a run with a fault, and what it said where it is lost."""
    code = run.end()
    if code == 0:
        if outcome(trial.folder) == whole:
            return "survived", ""
        return ("told", "") if "some of it will be read again" in run.text else ("lost", f"another outcome: {run.text}")
    if code < 0 or not run.one_line():
        return "lost", f"exit code {code}: {run.text}"
    trial.mend()
    again = trial.start()
    if again.end() == 0 and outcome(trial.folder) == whole:
        return "told", ""
    return "lost", f"told, but does not go on: {run.text}{again.text}"


def reliability(result: Result) -> str:
    """A row for each kind of fault."""
    rows = [[kind, *(str(count[what]) for what in OUTCOMES)] for kind, count in result["faults"].items()]
    rows += [[kind, f"not tried: {why}", *[""] * (len(OUTCOMES) - 1)] for kind, why in result["not_tried"].items()]
    total = [str(sum(count[what] for count in result["faults"].values())) for what in OUTCOMES]
    return table(["fault", *OUTCOMES], [*rows, ["all", *total]])


def undisturbed(folder: Path, mesh: str) -> Any:
    """The outcome of a run that nobody disturbs. Raises RuntimeError if there is none."""
    (folder / "text").mkdir(parents=True)
    for n in range(20):
        (folder / "text" / f"{n}.txt").write_text(f"this is document {n}. " * 100)
    run = Run(folder, words_with(mesh))
    if run.end() or (whole := outcome(folder)) is None:
        raise RuntimeError(f"the undisturbed run failed: {run.text}")
    return whole


def why_not(kind: str, place: Path) -> str:
    """Why a kind of fault is not tried here; empty if it is."""
    if kind in LINKS:
        return why_no_link(worse=kind == BAD_LINK)
    return why_no_disk(place / "disk") if kind == FULL else ""


def tried(kinds: list[str], each: int, seed: int, place: Path) -> Result:
    """All trials: counts by kind, and what was said where something was lost."""
    wholes, faults, lost = dict[str, Any](), {}, []
    absent = {kind: why for kind in kinds if (why := why_not(kind, place))}
    for kind in (kind for kind in kinds if kind not in absent):
        counts = Counter[str]()
        way, fault = FAULTS.get(kind, (PLAIN, kill_rank))
        if way.mesh not in wholes:
            wholes[way.mesh] = undisturbed(place / f"whole{len(wholes)}", way.mesh)
        whole = wholes[way.mesh]
        for n in range(each):
            trial = Trial(place / f"{kind.replace(' ', '-')}-{n}", random.Random(f"{seed} {kind} {n}"), way)
            shutil.copytree(place / "whole0" / "text", trial.folder / "text")
            try:
                found, why = LINKS[kind](trial, whole) if kind in LINKS else judged(trial, fault(trial), whole)
            finally:
                trial.close()
            counts.update([found, "tried"])
            print(f"{kind}, {n}: {found}", flush=True)
            if why:
                lost.append({"fault": kind, "trial": n, "why": why[-3000:]})
                print(why[-3000:], flush=True)
            else:
                shutil.rmtree(trial.folder)
        faults[kind] = {what: counts[what] for what in OUTCOMES}
    return {"seed": seed, "words": WORDS, "faults": faults, "not_tried": absent, "lost": lost}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--each", type=int, default=4, help="trials of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(os.environ, RANKS)
    import hocket.train.trainer  # noqa: F401  (once, and not in every run)

    with TemporaryDirectory() as place:
        result = tried(options.kinds, options.each, options.seed, Path(place))
    print(write("faults", dict(result), options.out, options.commit))
    print(reliability(result))
    sys.exit(bool(result["lost"]))


if __name__ == "__main__":
    main()
