"""Which settings may go together: one table of rules.

A broken rule becomes one line: setting, value, where the value came from, the reason, and a fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hocket.config import BYTES, Config
from hocket.config.bounds import MOST_RANKS
from hocket.program.layer import order_problem
from hocket.settings.architecture_rules import ARCHITECTURE_RULES, has_experts
from hocket.settings.context_rules import CONTEXT_RULES
from hocket.settings.fp8_rules import FP8_RULES
from hocket.settings.graph_rules import GRAPH_RULES
from hocket.settings.layer_rules import LAYER_RULES
from hocket.settings.network_rules import NETWORK_RULES, ranks_of_a_host
from hocket.settings.origins import asked
from hocket.settings.overlap_rules import OVERLAP_RULES
from hocket.settings.plan_rules import (
    PLAN_RULES,
    longest_stage,
    named,
    stages,
)
from hocket.settings.rope_rules import ROPE_RULES
from hocket.settings.rule import Host, Rule
from hocket.settings.schema import line
from hocket.settings.tensor_rules import TENSOR_RULES, no_pieces
from hocket.settings.training_rules import TRAINING_RULES
from hocket.settings.transport_rules import TRANSPORT_RULES, slowed_alone

RANKS_OF_A_CORE = 8
"""Most ranks that hocket starts for each CPU core where they compute on CPUs: they take turns, and each has memory of
its own. Those of torchrun and Slurm are there already."""

LARGEST_BETA = 1 - 2**-6
"""Of averages in bf16. See Note: [Averages in bf16] in `fsdp/planned/adamw.py`."""


RULES: tuple[Rule, ...] = (
    # Model
    Rule(
        ("model.heads", "model.kv_heads"),
        lambda c, h: not c.model.latent and c.model.heads % c.model.kv_heads != 0,
        "{model.heads} query heads cannot share {model.kv_heads} key and value heads evenly",
        "make model.heads a multiple of model.kv_heads",
    ),
    Rule(
        ("model.head_dim",),
        lambda c, h: not c.model.latent and c.model.head_dim % 2 != 0,
        "the rotary embedding turns pairs of elements",
        "an even model.head_dim",
    ),
    *ROPE_RULES,
    Rule(
        ("model.qk_norm_over", "model.qk_norm"),
        lambda c, h: not c.model.qk_norm,
        "no effect: queries and keys have no norm",
        "model.qk_norm = True, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.norms", "model.experts"),
        lambda c, h: c.model.norms == "after" and has_experts(c),
        "layers with experts have their norms before attention and experts",
        "model.norms = before, or model.experts = 0",
    ),
    Rule(
        ("model.top_k", "model.experts"),
        lambda c, h: 0 < c.model.experts < c.model.top_k,
        "a token cannot choose {model.top_k} of {model.experts} experts",
        "model.top_k at most model.experts",
    ),
    *ARCHITECTURE_RULES,
    *(
        Rule(
            (setting, "precision.compute"),
            lambda c, h, name=name: has_experts(c) and getattr(c.model, name) * c.element_bytes % 16 != 0,
            "products of experts need rows of a multiple of 16 bytes, and {precision.compute} has {width} per element",
            f"make {setting} a multiple of {{unit}}",
        )
        for setting, name in (("model.hidden", "hidden"), ("model.expert_ffn", "expert_ffn"))
    ),
    Rule(
        ("model.dense_layers", "model.layers"),
        lambda c, h: any(layer >= c.model.layers for layer in c.model.dense_layers),
        "model.dense_layers names layers that do not exist; they are numbered 0 to {last_layer}",
        "model.dense_layers with smaller numbers, or more model.layers",
    ),
    *(
        Rule(
            (setting, "model.experts"),
            lambda c, h: not has_experts(c),
            "no effect: the model has no MoE layer",
            "a model with experts, or leave it out",
            only_if_set=True,
        )
        for setting in (
            "model.top_k",
            "model.expert_ffn",
            "model.shared_ffn",
            "model.router",
            "model.routing",
            "model.normalize_top_k",
            "model.route_scale",
            "model.route_groups",
            "model.route_top_groups",
            "model.route_group_score",
            "model.router_bias",
            "model.expert_bias",
            "model.aux_loss",
            "model.aux_loss_over",
            "model.z_loss",
            "model.bias_rate",
        )
    ),
    Rule(
        ("model.dense_layers", "model.experts"),
        lambda c, h: c.model.experts == 0 and bool(c.model.dense_layers),
        "no effect: without experts every layer is dense",
        "set model.experts, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.ffn", "model.dense_layers"),
        lambda c, h: "dense" not in c.model.kinds(),
        "no effect: every layer is a MoE layer",
        "more model.dense_layers, or leave it out",
        remark=True,
    ),
    Rule(
        ("model.bias_rate", "model.routing"),
        lambda c, h: c.model.routing == "even" and has_experts(c),
        "no effect: an even spread asks neither scores nor biases",
        "model.routing = learnt, or leave it out",
        remark=True,
    ),
    *LAYER_RULES,
    # Mesh
    Rule(
        ("mesh.ep", "mesh.dp", "mesh.tp"),
        lambda c, h: c.mesh.data * c.mesh.tp % c.mesh.ep != 0,
        "expert-parallel ranks are on one pipeline rank, and {mesh.ep} does not divide mesh.dp = {mesh.dp}{others}",
        "make mesh.dp x mesh.cp x mesh.tp a multiple of mesh.ep",
    ),
    Rule(
        ("mesh.ep", "model.experts"),
        lambda c, h: c.mesh.ep > 1 and not has_experts(c),
        "the model has no MoE layer whose experts could be spread over {mesh.ep} ranks",
        "mesh.ep = 1, or a model with experts",
    ),
    Rule(
        ("model.experts", "mesh.ep"),
        lambda c, h: c.mesh.ep > 1 and has_experts(c) and c.model.experts % c.mesh.ep != 0,
        "{model.experts} experts cannot be spread evenly over mesh.ep = {mesh.ep} ranks",
        "make model.experts a multiple of mesh.ep",
    ),
    Rule(
        ("mesh.shard", "mesh.dp"),
        lambda c, h: c.mesh.shard > 0 and c.mesh.data % c.mesh.shard != 0,
        "{mesh.shard} ranks cannot share each copy of the weights of mesh.dp = {mesh.dp}{contexts} ranks",
        "a mesh.shard that divides mesh.dp x mesh.cp, or leave mesh.shard out",
    ),
    Rule(
        ("mesh.shard", "mesh.ep", "mesh.tp"),
        lambda c, h: c.mesh.shard * c.mesh.tp % c.mesh.ep != 0,
        "a copy of the weights has all experts, which are on mesh.ep = {mesh.ep} ranks, and {mesh.ep} does not divide "
        "mesh.shard = {mesh.shard}{tensors}",
        "make mesh.shard x mesh.tp a multiple of mesh.ep, or leave mesh.shard out",
    ),
    Rule(
        ("mesh.shard", "overlap.dp.strategy"),
        lambda c, h: c.mesh.replicas > 1 and (c.mesh.shard == 1 or c.overlap.dp.strategy == "no_shard"),
        "every rank has a copy of all weights of its own then, so there is nothing that {mesh.shard} ranks could share",
        "overlap.dp.strategy = no_shard without mesh.shard, or another overlap.dp.strategy and mesh.shard = 2 or more",
    ),
    *TENSOR_RULES,
    *CONTEXT_RULES,
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: h.workers > c.mesh.world or (0 < h.workers < c.mesh.world and not c.run.elastic),
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} ranks, but {host.workers} processes were started",
        "start {world} processes, or another mesh{elastic}",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: c.mesh.world > MOST_RANKS,
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} ranks",
        f"a smaller mesh of {MOST_RANKS} ranks at most",
    ),
    *NETWORK_RULES,
    *FP8_RULES,
    Rule(
        ("precision.averages", "train.betas"),
        lambda c, h: c.precision.averages == "bf16" and max(c.train.betas) > LARGEST_BETA,
        "an average in bf16 does not follow gradients at a decay rate above "
        f"{LARGEST_BETA:.3f}, and train.betas = {{train.betas}}: most steps would change less than its last digit",
        "precision.averages = fp32, or lower train.betas",
    ),
    Rule(
        ("train.device",),
        lambda c, h: c.train.device == "cuda" and h.gpus == 0,
        "torch finds no usable GPU on this host",
        "train.device = cpu, or install a torch with CUDA",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "train.device"),
        lambda c, h: c.train.device == "cuda" and 0 < h.gpus < (h.local_workers or c.mesh.world),
        "every rank needs a GPU of its own: this host has {host.gpus} and would run {local_world} ranks",
        "{fewer_ranks}, or train.device = cpu",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: c.train.device == "cpu" and not h.workers and 0 < RANKS_OF_A_CORE * h.cores < c.mesh.world,
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} processes that would compute on this host's "
        "CPU cores, and it has {host.cores}",
        f"a smaller mesh of at most {RANKS_OF_A_CORE} ranks for each core, or torchrun or srun on several hosts",
    ),
    *PLAN_RULES,
    *OVERLAP_RULES,
    # Data
    Rule(
        ("data.paths",),
        lambda c, h: any(not path.strip() for path in c.data.paths),
        "an empty path",
        "data.paths with files or folders, or leave data.paths out, which takes Python's own source",
    ),
    Rule(
        ("data.tokenizer",),
        lambda c, h: not c.data.tokenizer.strip(),
        "an empty name",
        "data.tokenizer = bytes, or the path of a tokenizers JSON file",
    ),
    Rule(
        ("data.tokenizer", "model.weights"),
        lambda c, h: bool(c.model.weights) and c.data.tokenizer == BYTES and h.tokenizer_vocab > 0,
        "a token would be a byte, and {model.weights} has weights for tokens of a tokenizer of its own",
        "the folder or file of that tokenizer, or data.tokenizer = bytes (by name, if they are meant)",
        unless_set=True,
    ),
    Rule(
        ("data.eos", "data.bos", "data.tokenizer"),
        lambda c, h: c.data.tokenizer == BYTES and (bool(c.data.eos) or c.data.bos != "auto"),
        "byte 0 ends a document of bytes, and no token begins it",
        "leave data.eos and data.bos out, or another data.tokenizer",
    ),
    Rule(
        ("data.cache",),
        lambda c, h: not c.data.cache.strip(),
        "an empty path",
        "leave data.cache out, or the path of a folder",
    ),
    Rule(
        ("model.vocab", "data.tokenizer"),
        lambda c, h: c.model.vocab < h.tokenizer_vocab,
        "the tokenizer has {host.tokenizer_vocab} tokens, more than the model",
        "model.vocab = {host.tokenizer_vocab} or more",
    ),
    Rule(
        ("data.validation",),
        lambda c, h: len(c.data.validation) > 1 and len(c.data.held_out) < len(c.data.validation),
        "one share of the tokens is kept for validation, or files and folders are read",
        "leave data.validation out",
    ),
    Rule(
        ("data.validation",),
        lambda c, h: any(not path.strip() for path in c.data.held_out),
        "an empty path",
        "data.validation with files or folders, or leave data.validation out",
    ),
    Rule(
        ("data.paths", "data.validation"),
        lambda c, h: bool(c.data.sources) and (len(c.data.paths) > 1 or bool(c.data.held_out)),
        "a TOML file is one of sources, and each source names its own text",
        "data.paths with files or folders, or leave data.paths and data.validation out",
    ),
    Rule(
        ("data.text_key",),
        lambda c, h: len(c.data.text_key) not in (1, 2) or not all(name.strip() for name in c.data.text_key),
        "it is the name of the text, or the names of a prompt and of the text",
        "leave data.text_key out",
    ),
    Rule(
        ("data.validation", "train.eval_batches"),
        lambda c, h: c.data.kept_back == 0 and c.train.eval_batches > 0 and not (c.data.held_out or c.data.sources),
        "nothing is kept for validation, but train.eval_batches = {train.eval_batches}",
        "data.validation above 0, or train.eval_batches = 0",
    ),
    # Training
    *TRAINING_RULES,
    Rule(
        ("train.eval_every", "train.eval_batches"),
        lambda c, h: c.train.eval_every > 0 and c.train.eval_batches == 0,
        "no effect: train.eval_batches = 0 means no validation",
        "train.eval_batches above 0, or leave train.eval_every out",
        only_if_set=True,
    ),
    *TRANSPORT_RULES,
    *GRAPH_RULES,
    Rule(
        ("run.resume", "train.transport"),
        lambda c, h: c.train.transport == "null" and c.run.resume not in ("auto", "off"),
        "no effect: a run without communication is no training, it loads and saves nothing",
        "leave run.resume out, or another train.transport",
    ),
    Rule(
        ("train.profile", "train.steps"),
        lambda c, h: bool(c.train.profile) and (len(c.train.profile) != 2 or c.train.profile[1] < 1),
        "the profiled window is given by its first step (0: soon after the start) and its number of steps",
        "two numbers in train.profile, such as 10 2",
    ),
    Rule(
        ("train.profile", "train.steps"),
        lambda c, h: len(c.train.profile) == 2 and sum(c.train.profile) > c.train.steps + (c.train.profile[0] > 0),
        "the run ends before the profiled window does",
        "a train.profile that ends by train.steps = {train.steps}",
    ),
    Rule(
        ("run.name",),
        lambda c, h: not c.run.name.strip() or "/" in c.run.name or c.run.name in (".", ".."),
        "a run's name is a folder's name",
        "a run.name without slashes (run.folder names another place)",
    ),
    Rule(
        ("run.resume",),
        lambda c, h: not c.run.resume.strip(),
        "an empty path",
        "run.resume = auto or off, or the path of a checkpoint",
    ),
)


def broken(config: Config, host: Host, origins: Mapping[str, str]) -> list[Rule]:
    """The rules that are broken. Needs a configuration that is within bounds and has no `auto` left."""
    binding = (rule for rule in RULES if not rule.remark)
    return [
        rule
        for rule in binding
        if not (rule.only_if_set if not asked(origins, rule.settings[0]) else rule.unless_set)
        and rule.broken(config, host)
    ]


def rule_lines(rules: Sequence[Rule], config: Config, host: Host, origins: Mapping[str, str]) -> list[str]:
    """Broken rules as lines, each about the setting that the user touched if there is one, else about the first."""
    by_setting: dict[str, list[Rule]] = {}
    for rule in rules:
        setting = next((name for name in rule.settings if asked(origins, name)), rule.settings[0])
        by_setting.setdefault(setting, []).append(rule)
    return [line(config, origins, name, *why(some, config, host)) for name, some in by_setting.items()]


def why(rules: Sequence[Rule], config: Config, host: Host) -> tuple[str, str]:
    """The reasons and the fixes of broken rules, numbered if there are several."""
    reasons = [rule_text(rule.reason, config, host) for rule in rules]
    return numbered(reasons), numbered([rule_text(rule.fix, config, host) for rule in rules])


def numbered(texts: Sequence[str]) -> str:
    """Several texts as one."""
    return texts[0] if len(texts) == 1 else "; ".join(f"[{n}] {text}" for n, text in enumerate(texts, start=1))


def rule_text(text: str, config: Config, host: Host) -> str:
    """The reason or fix of a rule, with the values it speaks of filled in."""
    sections = {section.name: getattr(config, section.name) for section in dataclasses.fields(Config)}
    world, mesh = config.mesh.world, config.mesh
    axes = ("cp", mesh.cp), ("tp", mesh.tp)
    contexts, tensors = (f" x mesh.{axis} = {ranks}" if ranks > 1 else "" for axis, ranks in axes)
    return text.format(
        **sections,
        host=host,
        world=world,
        no_pieces=no_pieces(config, host),
        contexts=contexts,
        shares=f" / mesh.cp = {mesh.cp}" if mesh.cp > 1 else "",
        tensors=tensors,
        shares_of_heads=f" / mesh.tp = {mesh.tp}" if mesh.tp > 1 else "",
        others=contexts + tensors,
        on_a_host=ranks_of_a_host(config, host),
        stages=stages(config),
        longest=longest_stage(config),
        tokens=config.tokens,
        width=config.element_bytes,
        unit=16 // config.element_bytes,
        last_layer=config.model.layers - 1,
        order=order_problem(config.plan.layer_order),
        local_world=host.local_workers or world,
        fewer_ranks="fewer processes on each host" if host.local_workers else "a smaller mesh",
        elastic=", or run.elastic = True" if host.workers < world else "",
        **named(config),
        decay=config.train.decay[0],
        slowed_alone=" and ".join(slowed_alone(config)),
    )
