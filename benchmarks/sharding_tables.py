"""Tables of sharding: `hocket.fully_shard` beside FSDP2, what its parts buy, copy engines, weight gradients."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.contender_tables import settings, tokens_of, workloads
from benchmarks.markdown import Result, table, us

OURS, PEER, PEER_FP32 = "fully_shard_ce", "fsdp2_tuned", "fsdp2_tuned_fp32"

PARTS = {
    "fully_shard_slots": "NCCL, fixed slots",
    "fully_shard": "memory of gathered weights comes and goes",
    "fully_shard_unified": "one process group and queue for gathers and reductions",
    "fully_shard_copied": "autograd makes weight gradients, which are then copied",
    "fully_shard_fp32_wire": "gradients sent in fp32",
    "fully_shard_ce_gather": "gathers on copy engines",
    "fully_shard_ce": "gathers and reductions on copy engines",
    "fully_shard_null": "nothing moves",
}
"""Contender -> in which single thing it differs from the first one. Some are of earlier commits."""
EXPERT_STEPS = {
    "hocket_sequential": "one microbatch after the other",
    "merged": "a forward beside another microbatch's backward",
    "deferred": "weight gradients behind what others wait for",
    "hocket": "warm-up and cool-down merged too",
    "hocket_ce": "gathers, reductions and rows on copy engines",
    "hocket_graph": "splits that no host knows, steps replayed, on NCCL",
    "hocket_graph_ce": "the same, gathers and reductions on copy engines",
    "hocket_null": "hocket, nothing moves",
}
"""Contender -> what it has that those above it have not."""

AIMS = {
    "share of the bound": ("bound", (0.87, 0.93, 0.96)),
    "speed over FSDP2, bf16 reduction": (PEER, (1.28, 1.12, 1.06)),
    "speed over FSDP2, fp32 reduction": (PEER_FP32, (1.36, 1.18, 1.08)),
}
"""What is aimed at on 8 GPUs: over whom, and by how much at each of `LENGTHS`."""
MEGATRON_AIM = (1.20, 1.10, 1.05)
MEMORY_AIM = 1.05
"""Most of FSDP2's peak memory that is aimed at."""
LENGTHS = ("2,048", "4,096", "8,192")
"""Tokens per GPU."""


def headline(*results: Result) -> str:
    """`fully_shard` on copy engines beside its bound and FSDP2: a row for every sequence length."""
    rows = []
    for found in workloads(results):
        by_name = found["contenders"]
        cells = [f"{tokens_of(found)} tokens per GPU", f"{1e3 * by_name['bound']['seconds']:,.0f} ms"]
        for name in (OURS, PEER, PEER_FP32):
            share = by_name[name]["speed_over"]["bound"]["median"]
            cells.append(f"{1e3 * by_name[name]['seconds']:,.0f} ms ({share:.2f})")
        cells += [f"{by_name[OURS]['speed_over'][name]['median']:.2f}" for name in (PEER, PEER_FP32)]
        rows.append([*cells, " / ".join(f"{by_name[name]['peak_bytes'] / 2**30:.0f}" for name in (OURS, PEER))])
    head = ["step (share of the bound)", "bound", "fully_shard, copy engines", "FSDP2, bf16", "FSDP2, fp32"]
    return table([*head, "speed over bf16", "over fp32", "GiB, fully_shard / FSDP2"], rows)


def aims(short: Result, long: Result, peers: Result) -> str:
    """What is aimed at, beside what was measured; `peers` has megatron-fsdp, at one length."""
    rows = {name: [name] for name in AIMS}
    memory = ["memory over FSDP2, bf16 reduction"]
    for i, found in enumerate(workloads([short, long])):
        assert tokens_of(found) == LENGTHS[i]
        by_name = found["contenders"]
        for name, (other, wanted) in AIMS.items():
            rows[name].append(verdict(by_name[OURS]["speed_over"][other], wanted[i]))
        used = by_name[OURS]["peak_bytes"] / by_name[PEER]["peak_bytes"]
        memory.append(f"{used:.2f}, aim at most {MEMORY_AIM}: {'met' if used <= MEMORY_AIM else 'missed'}")
    megatron = dict.fromkeys(LENGTHS, "not measured")
    for found in workloads([peers]):
        length, ratio = tokens_of(found), found["contenders"][OURS]["speed_over"][found["best_peer"]]
        megatron[length] = verdict(ratio, MEGATRON_AIM[LENGTHS.index(length)])
    faster = ["speed over megatron-fsdp, 16 layers", *megatron.values()]
    return table(["tokens per GPU", *LENGTHS], [*rows.values(), faster, memory])


def verdict(ratio: Mapping[str, float], aim: float) -> str:
    """Whether the median meets an aim, and whether the interval leaves that open."""
    word = "met" if ratio["median"] >= aim else "missed"
    doubt = ", within noise" if ratio["low"] <= aim <= ratio["high"] else ""
    return f"{ratio['median']:.3f}, aim {aim:.2f}: {word}{doubt}"


def parts(result: Result) -> str:
    """Variants of `fully_shard` that differ in one thing from the first of `PARTS`."""
    return _one_by_one(result, PARTS)


def expert_steps(result: Result) -> str:
    """From a sequential plan to replayed steps, one thing after the other."""
    return _one_by_one(result, EXPERT_STEPS)


def _one_by_one(result: Result, about: Mapping[str, str]) -> str:
    """Contenders as named in `about`, those that were measured, beside the first of them."""
    (found,) = workloads([result])
    base, rows = next(name for name in about if name in found["contenders"]), []
    for name, words in about.items():
        if name in found["contenders"]:
            row = found["contenders"][name]
            ratio = row["speed_over"].get(base)
            speed = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "1"
            memory = f"{row['peak_bytes'] / 2**30:.0f}"
            rows.append([f"*{name}*: {words}", f"{1e3 * row['seconds']:,.1f} ms", speed, f"{row['noise']:.1%}", memory])
    return table(["variant", "step", "speed over the first", "A against A", "GiB"], rows)


def parts_settings(result: Result) -> str:
    """Their settings, the first of `PARTS` in full."""
    (found,) = workloads([result])
    ordered = {name: found["contenders"][name] for name in PARTS if name in found["contenders"]}
    return settings({**result, "workloads": [{**found, "contenders": ordered}]})


def copy_engine(result: Result) -> str:
    """A gather and a reduction of one layer, with nothing beside them."""
    rows = []
    for kind in ("gather", "reduce"):
        found = result["alone"][kind]
        cells = [f"{us(row['seconds'])}, {row['gb_per_s']:.0f} GB/s" for row in found.values()]
        rows.append([kind, *cells, f"{found['nccl']['seconds'] / found['copy_engine']['seconds']:.2f}"])
    return table(["alone", "NCCL's kernels", "copy engines", "times as fast"], rows)


def copy_engine_tax(result: Result) -> str:
    """By how much products take longer with gathers and reductions beside them."""
    cases, names = result["beside"]["cases"], {"nccl": "NCCL's kernels", "copy_engine": "copy engines"}
    shown = {
        "nothing": "nothing",
        "nccl": f"gathers and reductions on {names['nccl']}",
        "copy_engine_gathers": f"gathers on {names['copy_engine']}, reductions on {names['nccl']}",
        "copy_engine": f"gathers and reductions on {names['copy_engine']}",
        "nccl gathers alone": f"only gathers, on {names['nccl']}",
        "copy_engine gathers alone": f"only gathers, on {names['copy_engine']}",
        "nccl reduces alone": f"only reductions, on {names['nccl']}",
        "copy_engine reduces alone": f"only reductions, on {names['copy_engine']}",
        "copy_engine exchanges alone": f"only the exchange of a reduction on {names['copy_engine']}",
    }
    rows = []
    for name, words in ((name, words) for name, words in shown.items() if name in cases):
        row = cases[name]
        times = f"{1e3 * row['seconds']:.1f} ms ({1e3 * min(row['all']):.1f} to {1e3 * max(row['all']):.1f})"
        rows.append([words, times, f"{row['tax']:+.1%}" if name != "nothing" else "-"])
    return table(["beside the products", "products take", "longer by"], rows)


def row_exchange(result: Result) -> str:
    """All-to-alls of rows alone, and what they cost products beside them."""
    rows = []
    for name, alone in result["alone"].items():
        host = us(alone["host_seconds"]) if "host_seconds" in alone else "-"
        cells = [us(alone["seconds"]), f"{alone['gb_per_s']:.0f} GB/s", host, f"{result['beside'][name]['tax']:+.1%}"]
        rows.append([name, *cells])
    return table(["rows by", "alone", "leaving a rank", "host", "products take longer by"], rows)


def copy_engine_sum(result: Result) -> str:
    """The sum behind a copy engine's reduction, by the number of its programs."""
    cases, rows = result["beside"]["cases"], []
    for programs, alone in result["alone"]["sum"].items():
        case = cases.get(f"copy_engine reduces alone, {programs} programs")
        tax = f"{case['tax']:+.1%}" if case else "-"
        rows.append([f"{int(programs):,}", f"{us(alone['seconds'])}, {alone['gb_per_s']:,.0f} GB/s", tax])
    return table(["programs of the sum", "alone", "products beside such reductions"], rows)


def weight_grads(result: Result) -> str:
    """All products of a layer, in a row for each number of tokens."""
    rows = result["weights"]
    ways, counts = list(rows[0]["seconds"]), dict.fromkeys(row["tokens"] for row in rows)
    sums = {n: [sum(row["seconds"][way] for row in rows if row["tokens"] == n) for way in ways] for n in counts}
    return table(
        ["weight gradients of one layer", *ways], [[f"{n:,} tokens", *map(us, own)] for n, own in sums.items()]
    )


def real_models(result: Result) -> str:
    """A row per model of another library and form: its step, and its memory, beside FSDP2's."""
    rows = []
    for key, forms in result["models"].items():
        first = forms["fsdp2"]
        for form, row in forms.items():
            speed, memory = first["milliseconds"] / row["milliseconds"], row["gigabytes"] / first["gigabytes"]
            took, used = f"{row['milliseconds']:.0f} ms", f"{row['gigabytes']:.1f} GB"
            rows.append([f"{key}: {form}", took, f"{speed:.3f}", used, f"{memory:.3f}"])
    return table(["model: form", "step", "speed over FSDP2", "memory", "of FSDP2's"], rows)
