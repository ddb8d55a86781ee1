"""Resolves a `Config` on a host into `Settings`: makes every automatic choice, with its reason.

It is pure: the same arguments give the same answer on every rank, without side effects. It reports all broken rules at
once.

Note: [One microbatch is not halved]
A single microbatch has no other one to merge with. One could halve it along the batch dimension, but halves would be
two microbatches. The auxiliary loss is a product of two means over a microbatch, so halves have another loss, and the
sum of gradients is rounded differently. A plan changes neither without being asked. So if nothing is merged for this
reason, the decision says that twice as many microbatches of half as many sequences are the same batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hocket.collector import without_collector
from hocket.config import Config
from hocket.config.model import described
from hocket.config.overlap import TENSOR as TP_METHOD
from hocket.config.rule import Host, Rule, leaf, problem, show
from hocket.config.schema import DEFAULTS, Implied, changed, impossible, source, types
from hocket.decision import Choice, Decision
from hocket.gpus import GPUS, GpuName, gpu_named, is_slice, nearest
from hocket.predict.hardware import hardware_of, measured_file, read_measured
from hocket.problems import stop_if
from hocket.rules import (
    CHECKS,
    broken,
    merges,
    numbered,
    rule_lines,
    rule_text,
)
from hocket.tune.choose import OPEN, choices
from hocket.tune.rules import (
    CHOSEN_BY_IT,
    GRAPHS,
    SPLITS,
    choose_graphs,
    choose_network,
    choose_splits,
    choose_tensor,
    choose_transport,
    chose_copies,
)
from hocket.tune.smaller_mesh import gives_up as given_up_when_smaller
from hocket.tune.smaller_mesh import smaller_mesh
from hocket.tune.trials import Price, Trials, model_costs


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """A `Config` with every choice made, and known to work on `host`."""

    host: Host
    """The host it was resolved for."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each setting that differs from the recipe was set, by dotted name."""
    decisions: tuple[Decision, ...] = ()
    """All automatic choices in the order in which they were made, then remarks."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.mesh.world

    @property
    def batch(self) -> int:
        """Sequences that one step consumes, over all ranks."""
        return self.mesh.dp * self.train.microbatches * self.train.sequences


@without_collector()
def resolve(
    config: Config,
    host: Host | None = None,
    origins: Mapping[str, str] | None = None,
    price: Price = model_costs,
    gives_up: bool = False,
) -> Settings:
    """Make every automatic choice of `config` and check the result.

    `origins` says where settings (dotted names) were set, for messages; a missing one came with the configuration
    itself, whose name is under the key "". `price` gives the costs of ops, for choices that depend on them. With
    `gives_up`, a setting below `overlap` that cannot work is chosen as if it had been left open, and its decision says
    so. Raises ValueError with one line per problem.
    """
    before = config if isinstance(config, Settings) else None
    host = host or (before.host if before else Host())
    origins = dict((before.origins if before else {}) if origins is None else origins)
    # A setting that was set to auto counts as not set.
    origins = {name: origin for name, origin in origins.items() if name not in types() or leaf(config, name) != "auto"}

    # Invalid values are replaced by defaults, so that rules about the other settings can still be checked.
    wrong = impossible(config, origins)
    sound = changed(config, {name: leaf(DEFAULTS, name) for name in wrong})

    # Choices that need no costs, then all broken rules at once.
    settled, decisions, unmet = _settled(sound, host, origins, gives_up=gives_up)
    rules, shrunk = _left_broken(settled, host, origins, unmet), list[Decision]()
    if config.run.elastic and not wrong and not rules:
        config, shrunk = smaller_mesh(sound, host, origins, partial(_runs, host=host, origins=origins), Trials(price))
        if shrunk:
            settled, decisions, unmet = _settled(config, host, origins, smaller=True)
            rules = _left_broken(settled, host, origins, unmet)
    rules = [rule for rule in rules if not wrong.keys() & set(rule.settings)]
    origins = {name: origin for name, origin in origins.items() if name not in unmet}
    stop_if([*wrong.values(), *rule_lines(rules, settled, host, origins)])

    # Choices by cost.
    settled = _priced(settled, decisions, host, origins)
    open_ = {decision.setting for decision in decisions}
    settled = _add(settled, decisions, choices(settled, host, Trials(price), open_))
    decisions = [*shrunk, *(decision for decision in decisions if decision.setting not in unmet)]
    decisions += [replace(decision, value=leaf(settled, name)) for name, decision in unmet.items()]

    # Remarks on settings without effect, and decisions of an earlier resolution that still hold.
    old = _still_chosen(before, settled) if before else {}
    decisions += _remarks(settled, host, origins, {decision.setting for decision in decisions} | old.keys())
    init, reasons = settled.model.init, (described(settled.model),)
    decisions.append(Decision(setting="model.init", value=init, asked=init, reasons=reasons))
    if host.tokenizer_begin:
        bos, reasons = settled.data.bos, (f"each document that is no chat begins with {host.tokenizer_begin}",)
        decisions.append(Decision(setting="data.bos", value=bos, asked=bos, reasons=reasons))
    decisions = _with_earlier(before, old, decisions) if before else decisions
    fields = {f.name: getattr(settled, f.name) for f in dataclasses.fields(Config)}
    return Settings(**fields, host=host, origins=origins, decisions=tuple(decisions))


def without_copies(settings: Settings, reason: str) -> Settings:
    """The settings for a host whose copy engines failed the test, if hocket chose copy engines.

    Settings chosen to save memory for copy engines stay, and so does a transport that the user set. Kernels that store
    rows into peers' memory (`runtime/peer_rows.py`) would fail too. So hocket no longer chooses them, nor the CUDA
    graph that contains them, unless the user set one of these.
    """
    if not chose_copies(settings, settings.decisions):
        return settings
    chosen, host = {decision.setting for decision in settings.decisions if decision.chosen}, settings.host
    anew, stored = set(CHOSEN_BY_IT), {GRAPHS, SPLITS}
    if settings.overlap.ep.splits == "device" and stored <= chosen:
        anew, host = anew | stored, dataclasses.replace(host, no_peer_memory=reason)
    open_ = dict.fromkeys(anew & chosen, "auto")
    return resolve(changed(settings, open_), dataclasses.replace(host, no_copy_engine=reason))


def _runs(config: Config, host: Host, origins: Mapping[str, str]) -> tuple[Config, Config] | None:
    """A smaller mesh's configuration without the settings it gives up, and the same with all choices without costs.

    None if a rule is broken, except by settings that are chosen later.
    """
    settled, _, unmet = _settled(config, host, origins, smaller=True)
    if _left_broken(settled, host, origins, unmet):
        return None
    return changed(config, {name: d.value for name, d in unmet.items()}), _priced(settled, [], host, origins)


def _left_broken(config: Config, host: Host, origins: Mapping[str, str], unmet: Mapping[str, Decision]) -> list[Rule]:
    """The rules that are still broken without the settings that were given up."""
    return broken(config, host, {name: origin for name, origin in origins.items() if name not in unmet})


def _priced(config: Config, decisions: list[Decision], host: Host, origins: Mapping[str, str]) -> Config:
    """A configuration with the choices that costs of ops depend on."""
    config = _add(config, decisions, choose_hardware(config, host, origins))
    config = _add(config, decisions, choose_network(config, host))
    tensor = choose_tensor(config, host)
    return _add(changed(config, {TP_METHOD: ("auto",)}) if tensor else config, decisions, tensor)


def _settled(
    config: Config, host: Host, origins: Mapping[str, str], smaller: bool = False, gives_up: bool = False
) -> tuple[Config, list[Decision], dict[str, Decision]]:
    """A configuration with all choices that need no costs, the choices, and the requests that were given up.

    Requests are given up if the caller `gives_up`, or if a `smaller` mesh than the configuration's cannot use them: see
    Note: [Settings that a smaller mesh gives up]. They are given up one at a time, since the next may then be possible.
    Each is then chosen like a setting that was left open.
    """
    unmet: dict[str, Decision] = {}
    while True:
        settled, decisions = config, list[Decision]()
        for setting, choose in CHOICES:
            if leaf(settled, setting) in OPEN:
                settled = _add(settled, decisions, [(setting, *choose(settled, host))])
        rules = _left_broken(settled, host, origins, unmet)
        name = next(
            (rule.settings[0] for rule in rules if _can_be_given_up(rule, config, unmet, smaller, gives_up)), ""
        )
        if not name:
            return settled, decisions, unmet
        mine = [rule for rule in rules if rule.settings[0] == name]
        unmet[name] = _unmet(name, mine, settled, host, origins, smaller)
        config = changed(config, {name: unmet[name].value})


def _can_be_given_up(rule: Rule, config: Config, unmet: Mapping[str, Decision], smaller: bool, gives_up: bool) -> bool:
    name = rule.settings[0]
    other = rule.only_if_set or leaf(config, name) != leaf(DEFAULTS, name)
    below = gives_up and name.startswith("overlap.")
    return name not in unmet and other and (below or (smaller and given_up_when_smaller(rule)))


def _unmet(
    name: str, rules: list[Rule], config: Config, host: Host, origins: Mapping[str, str], smaller: bool
) -> Decision:
    """A request that cannot be met, with all reasons and fixes. On a smaller mesh the only fix is more ranks."""
    reasons = tuple(rule_text(rule.reason, config, host) for rule in rules)
    fix = numbered([rule_text(rule.fix, config, host) for rule in rules])
    if smaller:
        reasons, fix = (f"on the smaller mesh: {numbered(reasons)}",), ""
    value, where = _without_broken(rules, config, host, origins), source(config, origins, name)
    asked = leaf(config, name)
    return Decision(setting=name, value=value, asked=asked, source=where, reasons=reasons, fix=fix, given_up=True)


def _without_broken(rules: list[Rule], config: Config, host: Host, origins: Mapping[str, str]) -> Any:
    """The value for a setting that breaks rules: a list loses the items that break them; others get the default."""
    name = rules[0].settings[0]
    items = leaf(config, name) if isinstance(leaf(config, name), tuple) else ()
    left = tuple(x for x in items if not any(rule.broken(changed(config, {name: (x,)}), host) for rule in rules))
    others = broken(changed(config, {name: left}), host, origins) if left else rules
    return leaf(DEFAULTS, name) if any(rule.settings[0] == name for rule in others) else left


def _add(config: Config, decisions: list[Decision], choices: Iterable[Choice]) -> Config:
    """Make choices for open settings, and add them to the decisions if they have a reason.

    A choice replaces earlier choices of the same setting.
    """
    for setting, value, reason in choices:
        earlier = next((i for i, decision in enumerate(decisions) if decision.setting == setting), len(decisions))
        if earlier < len(decisions) or leaf(config, setting) in OPEN:
            config = changed(config, {setting: value})
            reasons = (reason,) if isinstance(reason, str) else reason
            decision = Decision(setting=setting, value=value, reasons=reasons)
            decisions[earlier : earlier + 1] = [decision] if reason else []
    return config


def _remarks(config: Config, host: Host, origins: Mapping[str, str], decided: set[str]) -> Iterator[Decision]:
    """Remarks on settings without effect that the user did not set, and on a preset's values that a recipe overrode."""
    for rule in CHECKS:
        setting = rule.settings[0]
        came_with = setting in origins or leaf(config, setting) not in (leaf(DEFAULTS, setting), "off", ("off",))
        if (rule.only_if_set or rule.remark) and came_with and setting not in decided and rule.broken(config, host):
            yield _remark(rule, config, host, origins)
    for name, origin in origins.items():
        if isinstance(origin, Implied):
            yield from _preset_lost(config, name, origin)


def _still_chosen(before: Settings, settled: Config) -> dict[str, Decision]:
    """The earlier choices whose values are unchanged."""
    return {d.setting: d for d in before.decisions if d.chosen and leaf(settled, d.setting) == d.value}


def _with_earlier(before: Settings, old: Mapping[str, Decision], decisions: list[Decision]) -> list[Decision]:
    """The decisions, preceded by earlier ones that still hold, in their order."""
    fresh = {decision.setting for decision in decisions}
    kept = [d for d in before.decisions if d in decisions or (old.get(d.setting) == d and d.setting not in fresh)]
    return kept + [decision for decision in decisions if decision not in kept]


def _remark(rule: Rule, config: Config, host: Host, origins: Mapping[str, str]) -> Decision:
    """A setting without effect, as a decision."""
    setting = rule.settings[0]
    value, where = leaf(config, setting), source(config, origins, setting)
    reason, fix = (rule_text(text, config, host) for text in (rule.reason, rule.fix))
    return Decision(setting=setting, value=value, asked=value, source=where, reasons=(reason,), fix=fix)


def _preset_lost(config: Config, setting: str, origin: Implied) -> Iterator[Decision]:
    """A preset's value that a recipe overrode, as a decision."""
    if origin.by:
        value, fix = leaf(config, setting), f"{setting} = {show(origin.lost)} in a file or on the command line"
        reasons = (f"{origin} sets it, and comes before a preset",)
        yield Decision(setting=setting, value=value, asked=origin.lost, source=origin.by, reasons=reasons, fix=fix)


def choose_device(c: Config, h: Host) -> tuple[str, str]:
    ranks = h.local_workers or c.mesh.world
    if h.gpus == 0:
        return "cpu", "torch finds no usable GPU"
    if h.gpus < ranks:
        several = "" if h.workers else "; on several hosts torchrun or Slurm starts the ranks of each"
        return "cpu", f"{ranks} ranks on this host, but only {h.gpus} GPUs{several}"
    return "cuda", f"{h.gpus} GPUs for {ranks} ranks on this host"


def choose_dtype(c: Config, h: Host) -> tuple[str, str]:
    return ("bf16", "the ranks compute on GPUs") if c.train.device == "cuda" else ("fp32", "the ranks compute on CPUs")


def choose_wire(c: Config, h: Host) -> tuple[str, str]:
    if c.precision.compute == "fp32":
        return "fp32", "as precision.compute"
    if c.precision.compute == "fp8":
        return "bf16", "as what travels between products in fp8: fp32 would round nothing, and send twice the bytes"
    return c.precision.compute, "as precision.compute: fp32 would round nothing, and send twice the bytes"


def choose_merge(c: Config, h: Host) -> tuple[str, str]:
    if c.plan.order == "merged_v":
        return "on", "the order merged_v is made of merged steps"
    if not c.rows_travel:
        return "off", "there is no expert all-to-all to hide (needs MoE layers and mesh.ep above 1)"
    if c.plan.zero_bubble:
        return "off", f"in the order {c.plan.order} weight gradients fill the bubble, and nothing is merged"
    if c.plan.order == "sequential" and c.stages > 1:
        return "off", "in the sequential order each microbatch ends before the next one starts"
    if c.train.microbatches == 1:  # see Note: [One microbatch is not halved]
        same = f": 2 with train.sequences = {c.train.sequences // 2} are the same batch"
        return "off", f"one microbatch has nothing to merge with{same if c.train.sequences % 2 == 0 else ''}"
    if not any(merges(c, rank) for rank in range(c.mesh.pp)):
        return "off", f"all forwards of {c.train.microbatches} microbatches are warm-up: more microbatches would merge"
    return "on", "hides the expert all-to-all of one microbatch under another's compute"


def choose_order(c: Config, h: Host) -> tuple[str, str]:
    if c.mesh.pp == 1 and c.overlap.ep.merge == "off":
        return "sequential", "one pipeline rank and nothing merged"
    if c.plan.chunks > 1:
        return "interleaved", f"{c.plan.chunks} chunks per rank"
    return "1f1b", "one chunk per rank"


def choose_defer(c: Config, h: Host) -> tuple[str, str]:
    if c.plan.fills_bubble:
        return "on", f"in the order {c.plan.order} weight gradients have steps of their own"
    if c.mesh.pp > 1:
        return "on", "weight gradients run under the pipeline's sends"
    if c.mesh.ep > 1:
        return "on", "weight gradients run under the expert all-to-all"
    return "off", "there is no send and no all-to-all to hide (mesh.pp and mesh.ep are 1)"


def choose_folder(c: Config, h: Host) -> tuple[str, str]:
    if c.train.transport == "null":
        return f"runs/{c.run.name}-null", "what is no training stays away from the run of that name"
    return f"runs/{c.run.name}", "named after the run"


GPU = "hardware.gpu"


def choose_hardware(c: Config, h: Host, origins: Mapping[str, str]) -> Iterator[Choice]:
    """The GPU, or the file of its measured rates. Raises ValueError if a named file does not fit the run."""
    asked = c.hardware.gpu
    if asked != "auto":
        if asked.endswith(".json") and (file := read_measured(asked)) and c.precision.compute == "fp32":
            why = f"it was measured on {file.device} in bf16, and the run computes in fp32"
            raise ValueError(problem(GPU, asked, origins, why, f"{GPU} = laptop, or precision.compute = bf16"))
        return
    gpu, reason = _gpu_of(c, h)
    if kept := _kept(h, gpu):
        gpu, reason = kept, f"hocket doctor --measure kept it for {h.kinds[0]}"
    yield GPU, gpu, f"{reason}; rates {hardware_of(changed(c, {GPU: gpu})).origin}"


def _gpu_of(c: Config, h: Host) -> tuple[GpuName | str, str]:
    """The name of a GPU, and why."""
    if c.precision.compute == "fp32":
        return "laptop", "the run computes in fp32, and rates of GPUs are those of bf16"
    if not h.kinds:
        return "h200", f"no GPU here has a name, so an H200 is taken for granted; {GPU} names another one"
    found = {device: _table_gpu(device, h) for device in h.kinds}
    device = min(found, key=lambda each: GPUS[found[each][0]].flops)
    gpu, reason = found[device]
    if len(found) > 1:
        reason = f"this host has GPUs of several kinds ({', '.join(found)}), and all wait for the slowest: {reason}"
    return gpu, reason


def _table_gpu(device: str, h: Host) -> tuple[GpuName, str]:
    """The table's GPU for one of this host, and why."""
    gpu = gpu_named(device)
    if gpu is None:
        gpu = nearest(device, h.memory, h.processors, h.capability)
        why = f"{device} is not in the table of GPUs, and {gpu} is the nearest one by architecture and size"
        return gpu, f"{why}; hocket doctor --measure times it"
    if is_slice(device):
        why = f"{device} is a slice of a GPU, and the whole one is priced: steps take longer"
        return gpu, f"{why}; hocket doctor --measure times it"
    return gpu, f"this host has {device}"


def _kept(h: Host, gpu: str) -> str:
    """The file of rates measured for this host's GPUs, if all ranks run on them and it fits `gpu`; else empty."""
    if len(h.kinds) != 1 or h.local_workers != h.workers or not measured_file(h.kinds[0]).is_file():
        return ""
    path = str(measured_file(h.kinds[0]))
    return path if read_measured(path).gpu == gpu else ""


CHOICES: tuple[tuple[str, Callable[[Config, Host], tuple[str, str]]], ...] = (
    ("train.device", choose_device),
    ("precision.compute", choose_dtype),
    ("precision.wire", choose_wire),
    ("train.transport", choose_transport),
    ("overlap.ep.merge", choose_merge),
    ("plan.order", choose_order),
    ("overlap.defer_wgrad", choose_defer),
    ("plan.graphs", choose_graphs),
    ("overlap.ep.splits", choose_splits),
    ("run.folder", choose_folder),
)
"""How each open setting is chosen: a function returning (value, reason). Later choices depend on earlier ones."""
