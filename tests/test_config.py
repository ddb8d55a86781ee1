"""Settings: documented, bounded, resolved with reasons, and refused with a line that helps."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hocket import config as config_package
from hocket.config import Config, ModelConfig, Purpose, TrainConfig
from hocket.config.overlap import DIRECTIONS, ROLES, possible
from hocket.config.plan import OFFLOADED, RECOMPUTED
from hocket.config.rule import Host, leaf
from hocket.config.schema import bounds_of, impossible, types
from hocket.config.schema import changed as replaced
from hocket.program.ops import offloadable, recomputable
from hocket.program.transformer import STANDARD
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.rules import CHECKS
from tests.helpers.plans import NAMES
from tests.refused_models import REFUSED_MODELS
from tests.refused_orders import REFUSED_ORDERS
from tests.refused_training import REFUSED_TRAINING


def changed(base: Config, **settings: Any) -> Config:
    """`base` with settings replaced: `mesh__pp=2` is mesh.pp, and `merge="on"` is overlap.ep.merge."""
    return replaced(base, {full(name): value for name, value in settings.items()})


def full(name: str) -> str:
    return NAMES[name] if name in NAMES else name.replace("__", ".")


TINY = recipe("tiny")
PIECEWISE = [f"{role}_{direction}" for role in ROLES for direction in DIRECTIONS]
SLOW = changed(TINY, train__transport="slow", train__slow=("10ms",))
ALONE = changed(SLOW, mesh__pp=1, mesh__dp=1, mesh__ep=1)
DENSE = Config(model=ModelConfig(layers=4))
ONE_STAGE = changed(TINY, mesh__pp=1, plan__chunks=1)
LARGE_BATCH = changed(ONE_STAGE, precision__compute="bf16", train__sequences=30_000)


def flag(setting: str) -> str:
    return f"command line, --{setting}"


def refused(base: Config, host: Host | None = None, **settings: Any) -> str:
    origins = {full(name): flag(full(name)) for name in settings}
    with pytest.raises(ValueError) as caught:
        resolve(changed(base, **settings), host, origins)
    return str(caught.value)


def test_every_setting_has_a_docstring():
    files = Path(config_package.__file__).parent.glob("*.py")
    documented = set()
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Overlap")):
            for field, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    assert isinstance(following, ast.Expr), f"{node.name}.{field.target.id} has no docstring"
                    documented.add(field.target.id)
    assert {part for name in types() for part in name.split(".")} <= documented


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(numeric(arg) for arg in get_args(hint) if arg is not Ellipsis)


def test_every_number_has_bounds():
    numbers = {name for name, hint in types().items() if numeric(hint)}
    assert numbers == {name for name in types() if bounds_of(name)}


def test_items_of_recompute_and_offload_are_the_parts_that_can_be():
    assert recomputable(STANDARD) == RECOMPUTED
    assert offloadable(STANDARD) == OFFLOADED


def test_settings_that_name_others_exist():
    known = set(types())
    for rule in CHECKS:
        assert set(rule.settings) <= known
        for text in (rule.reason, rule.fix):
            for name in re.findall(r"\b(?:model|mesh|plan|overlap|data|train|optimizer|run)(?:\.[a-z_0-9]+)+", text):
                assert name in known or f"{{{name}}}" in text, f"{name} in {text!r}"


def test_the_parts_a_user_touches_first_import_no_torch():
    parts = "hocket.cli, hocket.launching.launch, hocket.planning, hocket.resolve"
    code = f"import sys, {parts}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# --------------------------------------------------------------------------------------------------- choices


CHOICES = [
    (DENSE, Host(), "train.device", "cpu"),
    (DENSE, Host(gpus=1), "train.device", "cuda"),
    (changed(DENSE, mesh__dp=4), Host(gpus=2), "train.device", "cpu"),
    (changed(DENSE, mesh__dp=16), Host(gpus=8, workers=16, local_workers=8), "train.device", "cuda"),
    (DENSE, Host(gpus=1), "precision.compute", "bf16"),
    (DENSE, Host(), "precision.compute", "fp32"),
    (DENSE, Host(gpus=1), "train.transport", "nccl"),
    (DENSE, Host(), "train.transport", "gloo"),
    (DENSE, Host(), "overlap.ep.merge", "off"),
    (DENSE, Host(), "plan.order", "sequential"),
    (DENSE, Host(), "overlap.defer_wgrad", "off"),
    (changed(DENSE, mesh__pp=2), Host(), "plan.order", "1f1b"),
    (changed(DENSE, mesh__pp=2), Host(), "overlap.defer_wgrad", "on"),
    (changed(DENSE, mesh__pp=2, plan__chunks=2), Host(), "plan.order", "interleaved"),
    (changed(TINY, merge="auto"), Host(), "overlap.ep.merge", "on"),
    (changed(TINY, merge="auto", mesh__ep=1), Host(), "overlap.ep.merge", "off"),
    (changed(TINY, merge="auto", plan__order="sequential"), Host(), "overlap.ep.merge", "off"),
    (
        changed(TINY, merge="auto", train__microbatches=2, mesh__pp=1, plan__chunks=1),
        Host(),
        "overlap.ep.merge",
        "on",
    ),
    (
        changed(TINY, merge="auto", train__microbatches=1, mesh__pp=1, plan__chunks=1),
        Host(),
        "overlap.ep.merge",
        "off",
    ),
    (TINY, Host(), "overlap.ep.merge_ends", "off"),
    (changed(TINY, merge="off"), Host(), "overlap.ep.merge_ends", "off"),
    (changed(TINY, mesh__ep=1), Host(), "overlap.ep.merge_ends", "off"),
    (ONE_STAGE, Host(), "overlap.ep.merge_ends", "on"),
    (changed(ONE_STAGE, mesh__pp=2, train__microbatches=8), Host(), "overlap.ep.merge_ends", "off"),
    (changed(TINY, mesh__pp=1), Host(), "overlap.ep.merge_ends", "off"),
    (changed(TINY, plan__group=4, plan__chunks=4, train__microbatches=8), Host(), "overlap.ep.merge_ends", "on"),
    (LARGE_BATCH, Host(gpus=2), "overlap.ep.merge_ends", "off"),
    (changed(TINY, defer_wgrad="auto", mesh__pp=1), Host(), "overlap.defer_wgrad", "on"),
    (TINY, Host(), "overlap.ep.splits", "host"),
    (TINY, Host(), "plan.graphs", "off"),
    (changed(DENSE, mesh__dp=4), Host(gpus=4), "plan.graphs", "on"),
    (changed(DENSE, mesh__dp=4, train__sequences=20_000), Host(gpus=4), "plan.graphs", "off"),
    (changed(DENSE, mesh__dp=4, precision__compute="fp32"), Host(gpus=4), "plan.graphs", "off"),
    (changed(DENSE, mesh__dp=4, data__packing="on"), Host(gpus=4), "plan.graphs", "off"),
    (changed(DENSE, mesh__dp=2, mesh__tp=2), Host(gpus=4), "plan.graphs", "off"),
    (changed(ONE_STAGE, splits="device"), Host(gpus=2), "plan.graphs", "on"),
    (changed(TINY, splits="device"), Host(gpus=4), "plan.graphs", "on"),
    (changed(ONE_STAGE, graphs="on"), Host(gpus=2), "overlap.ep.splits", "device"),
    (ONE_STAGE, Host(gpus=2), "overlap.ep.splits", "device"),
    (ONE_STAGE, Host(gpus=2, memory=1 << 20), "overlap.ep.splits", "host"),
    (ONE_STAGE, Host(gpus=2, no_peer_memory="far apart"), "plan.graphs", "off"),
    (changed(ONE_STAGE, splits="host"), Host(gpus=2), "plan.graphs", "off"),
    (changed(ONE_STAGE, copies="per_rank"), Host(gpus=2), "plan.graphs", "off"),
    (changed(ONE_STAGE, graphs="off"), Host(gpus=2), "overlap.ep.splits", "host"),
    (DENSE, Host(), "run.folder", "runs/run"),
]


@pytest.mark.parametrize(("config", "host", "setting", "wanted"), CHOICES)
def test_what_auto_becomes_and_why(config, host, setting, wanted):
    settings = resolve(config, host)
    assert leaf(settings, setting) == wanted
    reasons = [d.reason for d in settings.decisions if d.setting == setting and d.value == wanted]
    assert len(reasons) == 1
    assert len(reasons[0]) > 10


def test_nothing_is_left_open_and_nothing_that_was_set_is_changed():
    settings = resolve(TINY)
    open_values = {name for name in types() if leaf(settings, name) == "auto"}
    hosts = {name for name in types() if name.startswith("network.")}
    assert open_values == {"run.resume", "data.bos", *hosts}  # decided by what is on disk, and of no matter on one host
    for name in types():
        if leaf(TINY, name) not in ("auto", "", ("auto",)):
            assert leaf(settings, name) == leaf(TINY, name)


def test_resolving_is_pure_and_can_be_repeated():
    before = repr(TINY)
    once = resolve(TINY, Host(gpus=4))
    assert repr(TINY) == before
    assert once == resolve(TINY, Host(gpus=4))
    again = resolve(once, Host(gpus=4))
    assert isinstance(again, Settings)
    assert all(leaf(again, name) == leaf(once, name) for name in types())


def test_a_recipe_setting_that_loses_its_effect_is_a_remark_and_a_flag_an_error():
    alone = changed(TINY, mesh__pp=1, defer_layers=1)
    assert any(d.setting == "overlap.pp.defer_layers" and "no effect" in d.reason for d in resolve(alone).decisions)
    assert "overlap.pp.defer_layers = 1 (command line" in refused(alone, defer_layers=1)


# -------------------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[Config, dict[str, Any], str, str]] = [
    (DENSE, {"model__heads": 5}, "model.heads", "5 cannot be spread evenly over model.kv_heads = 2"),
    (TINY, {"model__hidden": 34}, "model.hidden", "fix: make model.hidden a multiple of 4"),
    (changed(TINY, precision__compute="bf16"), {"model__expert_ffn": 12}, "model.expert_ffn", "a multiple of 8"),
    (changed(DENSE, mesh__pp=2, plan__order="zb_v", plan__chunks=2, overlap__ep__merge="off"),
     {"model__tied": True, "overlap__pp__defer_head": 1}, "overlap.pp.defer_head", "wait for its other half"),
    *((DENSE, {f"model__{name}": value}, f"model.{name}", "no effect") for name, value in {
        "top_k": 1, "expert_ffn": 8, "shared_ffn": 8, "router": "sigmoid", "routing": "even", "normalize_top_k": False,
        "route_scale": 2.0, "aux_loss": 0.1, "bias_rate": 0.1, "z_loss": 0.1, "aux_loss_over": "batch",
        "shared_gate": True,
    }.items()),
    (DENSE, {"model__dense_layers": (0,)}, "model.dense_layers", "no effect"),
    (DENSE, {"splits": "device"}, "overlap.ep.splits", "without a model with experts"),
    (DENSE, {"data__eos": "</s>"}, "data.eos", "byte 0 ends a document"),
    (DENSE, {"data__bos": "on"}, "data.bos", "byte 0 ends a document"),
    (changed(TINY, mesh__tp=2), {"mesh__ep": 8}, "mesh.ep", "8 does not divide mesh.dp = 2 x mesh.tp = 2"),
    (changed(DENSE, mesh__dp=2), {"mesh__ep": 2}, "mesh.ep", "no MoE layer"),
    (changed(DENSE, mesh__tp=2), {"model__vocab": 257}, "model.vocab", "257 cannot be spread evenly over mesh.tp"),
    (changed(DENSE, mesh__tp=2, model__kv_heads=1), {"model__heads": 3}, "model.heads", "3 cannot be spread evenly"),
    (changed(DENSE, mesh__tp=4, model__heads=12), {"model__kv_heads": 6}, "model.kv_heads", "neither goes with 4"),
    (changed(DENSE, mesh__tp=2), {"model__ffn": 33}, "model.ffn", "33 cannot be spread evenly"),
    (changed(TINY, mesh__tp=2), {"model__shared_ffn": 33}, "model.shared_ffn", "33 cannot be spread evenly"),
    (changed(DENSE, mesh__tp=2), {"data__sequence_length": 33}, "data.sequence_length", "(1 x 33) cannot"),
    *((changed(DENSE, mesh__tp=2), {"overlap__tp__method": (f"{where}:{way}",)}, "overlap.tp.method", "these layers")
      for where, way in {"qkv_forward": "bulk", "qkv_backward": "ring", "proj_forward": "ring", "proj_backward": "bulk",
                      "fc1_forward": "pipeline", "fc1_backward": "ring", "fc2_forward": "bulk",
                      "fc2_backward": "pipeline"}.items()),
    *((changed(DENSE, mesh__tp=2), {"overlap__tp__method": (item,)}, "overlap.tp.method", "none of") for item in
      ("rings", "fc3_forward:ring", "fc1:ring", "fc1_forward:", ":off")),
    (TINY, {"model__experts": 7}, "model.experts", "7 cannot be spread evenly over mesh.ep"),
    (TINY, {"train__device": "cuda"}, "train.device", "no usable GPU"),
    (TINY, {"plan__chunks": 6}, "plan.chunks", "12 virtual stages, too many for model.layers = 8"),
    (TINY, {"plan__order": "1f1b"}, "plan.order", "plan.chunks is 1, not 2"),
    (changed(TINY, plan__chunks=1), {"plan__order": "interleaved"}, "plan.order", "plan.chunks is 2 or more, not 1"),
    (TINY, {"train__microbatches": 1}, "train.microbatches", "made for 2 microbatches or more"),
    (TINY, {"plan__group": 5}, "plan.group", "at most train.microbatches = 4"),
    (TINY, {"plan__group": 1}, "plan.group", "a group has at least mesh.pp = 2"),
    (changed(TINY, plan__chunks=1), {"plan__group": 2}, "plan.group", "no effect"),
    (changed(TINY, plan__order="sequential"), {"merge": "on"}, "overlap.ep.merge", "nothing to merge"),
    (changed(TINY, train__microbatches=1, mesh__pp=1), {"merge": "on"}, "overlap.ep.merge", "nothing would be merged"),
    (changed(TINY, merge="off"), {"merge_ends": "on"}, "overlap.ep.merge_ends", "where nothing is merged"),
    (changed(TINY, mesh__pp=1), {"merge_ends": "on"}, "overlap.ep.merge_ends", "no two microbatches follow each other"),
    (changed(TINY, mesh__ep=1), {"copies": "per_rank"}, "overlap.ep.copies", "no effect"),
    (changed(TINY, splits="device"), {"copies": "per_rank"}, "overlap.ep.copies", "overlap.ep.splits = host"),
    (changed(TINY, merge="off"), {"plan__layer_order": "wgrad_last"}, "plan.layer_order", "no effect"),
    (TINY, {"defer_layers": 3}, "overlap.pp.defer_layers", "no stage has as many layers"),
    (TINY, {"plan__recompute": ("attn", "attn:2")}, "plan.recompute", "named once"),
    (TINY, {"plan__recompute": ("auto", "attn")}, "plan.recompute", "auto goes with no part"),
    (changed(TINY, model__dense_layers=()), {"plan__recompute": ("mlp",)}, "plan.recompute", "has the part mlp"),
    (DENSE, {"plan__recompute": ("attn", "experts")}, "plan.recompute", "has the part experts"),
    (DENSE, {"plan__recompute": ("dispatch",)}, "plan.recompute", "has the part dispatch"),
    (changed(TINY, mesh__pp=1), {"defer_layers": 2}, "overlap.pp.defer_layers", "no effect with mesh.pp = 1"),
    (TINY, {"plan__layer_order": "wgrad"}, "plan.layer_order", "neither one of literature, early_release, wgrad_last"),
    (TINY, {"plan__layer_order": "cB aF eB dF eW dB eF cF aB aW uF"}, "plan.layer_order", "nor all 12 ops"),
    (TINY, {"plan__layer_order": "cB aF eW eB dF dB eF cF aB uB aW uF"}, "plan.layer_order", "eW needs eB"),
    (TINY, {"plan__layer_order": "cB eB aF dF eW dB eF cF aB uB aW uF"}, "plan.layer_order", "while the host waits"),
    (changed(TINY, defer_wgrad="off"), {"defer_layers": 2}, "overlap.pp.defer_layers", "overlap.defer_wgrad = off"),
    (changed(TINY, mesh__pp=1), {"defer_head": 1}, "overlap.pp.defer_head", "no effect with mesh.pp = 1"),
    (changed(TINY, defer_wgrad="off"), {"defer_head": 1}, "overlap.pp.defer_head", "with overlap.defer_wgrad = off"),
    (changed(TINY, train__microbatches=4), {"defer_head": 5}, "overlap.pp.defer_head", "a step has 4 microbatches"),
    (changed(TINY, defer_wgrad="off"), {"defer_layers": "attn"}, "overlap.pp.defer_layers", "no effect"),
    (TINY, {"defer_layers": "attn:9"}, "overlap.pp.defer_layers", "no stage has as many layers"),
    (TINY, {"defer_layers": "mlp:2"}, "overlap.pp.defer_layers", "'mlp:2' is neither a number of layers nor attn"),
    (TINY, {"model__layers": 1, "model__dense_layers": ()}, "model.layers", "layers = 1: only"),
    (changed(TINY, mesh__dp=1, mesh__ep=1, merge="off"), {"prefetch": 3}, "overlap.dp.prefetch", "no effect"),
    (changed(TINY, mesh__dp=1, mesh__ep=1), {"strategy": "optim_grads"}, "overlap.dp.strategy", "shared weights"),
    (changed(TINY, strategy="no_shard"), {"prefetch": 3}, "overlap.dp.prefetch", "with overlap.dp.strategy = no_shard"),
    (changed(TINY, defer_wgrad="off"), {"plan__layer_order": "wgrad_last"}, "plan.layer_order", "defer_wgrad = off"),
    (changed(TINY, mesh__ep=1, merge="off"), {"splits": "device"}, "overlap.ep.splits", "no effect with mesh.ep = 1"),
    (TINY, {"graphs": "on"}, "plan.graphs", "ranks compute on CPUs"),
    (TINY, {"graphs": "on", "splits": "host"}, "plan.graphs", "the host waits for the counts"),
    (TINY, {"graphs": "on", "update": "next_step", "optimizer__name": "muon"}, "plan.graphs", "Muon's updates"),
    (TINY, {"room": 3.0}, "overlap.ep.room", "no effect with overlap.ep.splits = host"),
    *((changed(TINY, **base), settings, setting, reason) for base, settings, setting, reason in REFUSED_ORDERS),
    *((changed(TINY, **base), settings, setting, reason) for base, settings, setting, reason in REFUSED_MODELS),
    (TINY, {"data__paths": ("",)}, "data.paths", "is empty"),
    (TINY, {"data__validation": ("",)}, "data.validation", "is empty"),
    (TINY, {"data__validation": ("a", 0.1)}, "data.validation", "one share of the tokens"),
    (TINY, {"data__paths": ("a.toml", "b")}, "data.paths", "and each source names its own"),
    (TINY, {"data__text_key": ("a", "b", "c")}, "data.text_key", "names of a prompt and of the text"),
    (TINY, {"data__tokenizer": " "}, "data.tokenizer", "is empty"),
    (TINY, {"data__cache": ""}, "data.cache", "is empty"),
    (TINY, {"data__validation": (0.0,)}, "data.validation", "nothing is kept for validation"),
    *((changed(TINY, **base), settings, setting, reason) for base, settings, setting, reason in REFUSED_TRAINING),
    (changed(TINY, train__eval_batches=0), {"train__eval_every": 5}, "train.eval_every", "no effect"),
    (TINY, {"train__transport": "nccl"}, "train.transport", "GPU memory only"),
    (TINY, {"train__transport": "slow"}, "train.transport", "nothing says which"),
    (SLOW, {"train__slow": ("a2a:10us", "pp_fwd:1ms", "a2a:1GB/s")}, "train.slow", "one is named twice"),
    *((TINY, {"train__slow": (item,)}, "train.slow", reason) for item, reason in {
        "a": "is no time", "a2b:1s": "is none of gather_dense", "a2a:": "is no time", "a2a:1GB/s,2": "has no unit",
        "0GB/s": "nothing would ever arrive"}.items()),
    *(
        (ALONE, {"train__slow": (f"{purpose}:1ms",)}, "train.slow", f"every group of {purpose} has one rank")
        for purpose in get_args(Purpose)
    ),
    (SLOW, {"train__slow": ("gather_experts:1ms",)}, "train.slow", "no effect: on this mesh"),
    (changed(TINY, train__transport="null"), {"run__resume": "x"}, "run.resume", "with train.transport = null"),
    (TINY, {"train__slow": ("10ms",)}, "train.slow", "no effect with train.transport = gloo"),
    (TINY, {"train__transport": "copy_engine"}, "train.transport", "moves GPU memory only"),
    (TINY, {"train__profile": (3,)}, "train.profile", "its first step (0: soon after the start)"),
    (TINY, {"train__profile": (1, 0)}, "train.profile", "its number of steps"),
    (TINY, {"train__profile": (149, 3)}, "train.profile", "ends before"),
    (TINY, {"run__name": "a/b"}, "run.name", "a folder's name"),
    (TINY, {"run__name": ".."}, "run.name", "a folder's name"),
    (TINY, {"run__resume": ""}, "run.resume", "is empty"),
    (TINY, {"train__microbatches": 60_000}, "train.microbatches", "plan of millions of operations"),
    (TINY, {"mesh__dp": 600_000}, "mesh.dp", "is 1200000 ranks"),
    (TINY, {"network__ranks_per_host": 3}, "network.ranks_per_host", "3 does not divide 4"),
    # Values that are impossible by themselves
    (TINY, {"train__steps": 0}, "train.steps", "out of range; fix: at least 1"),
    (TINY, {"train__lr": -1.0}, "train.lr", "out of range"),
    (TINY, {"train__lr": float("nan")}, "train.lr", "out of range"),
    (TINY, {"train__hang_timeout": float("inf")}, "train.hang_timeout", "out of range"),
    (TINY, {"train__betas": (0.9, 1.0)}, "train.betas", "out of range"),
    (TINY, {"model__hidden": "wide"}, "model.hidden", "not a whole number"),
    (TINY, {"model__hidden": True}, "model.hidden", "not a whole number"),
    (TINY, {"merge": "yes"}, "overlap.ep.merge", "not one of auto, on, off"),
    (TINY, {"data__paths": "text"}, "data.paths", "not a list"),
    (TINY, {"network__ranks_per_host": 0}, "network.ranks_per_host", "out of range; fix: at least 1"),
    (TINY, {"network__ranks_per_host": "all"}, "network.ranks_per_host", "not a whole number or auto"),
    (TINY, {"network__link": "50"}, "network.link", "has no unit: there are B/s"),
    (TINY, {"network__link": 50}, "network.link", 'has no unit, as "50GB/s, or'),
    (TINY, {"network__link": "50GB"}, "network.link", "is no rate"),
    (TINY, {"network__link": "-5GB/s"}, "network.link", "is no rate"),
    (TINY, {"network__link": "0Gb/s"}, "network.link", "nothing would ever arrive"),
    (TINY, {"network__link": f"0.{'0' * 315}1GB/s"}, "network.link", "nothing would ever arrive"),
    (TINY, {"network__link": f"1GB/s,{'9' * 300}s"}, "network.link", "is longer than an hour"),
    (TINY, {"network__link": "1GB/s,10"}, "network.link", "has no unit: there are s, ms, us; fix: auto, or such"),
    (TINY, {"network__link": "1GB/s," + "9" * 400 + "s"}, "network.link", "too many digits"),
]  # fmt: skip
WITH_HOST: list[tuple[Config, Host, dict[str, Any], str, str]] = [
    (changed(DENSE, mesh__tp=2, train__device="cuda"), Host(gpus=1, workers=2, local_workers=1),
     {"overlap__tp__method": ("ring",)}, "overlap.tp.method", "the GPUs of one host"),
    *(
        (changed(DENSE, mesh__tp=2, train__device="cuda"), Host(gpus=2, no_peer_memory="GPU 0 is far"),
         {"overlap__tp__method": (item,)}, "overlap.tp.method", "GPU 0 is far, and pieces are copied there")
        for item in ("pipeline", *(f"{at}:{possible(*at.split('_'))[-1]}" for at in PIECEWISE))
    ),
    (DENSE, Host(tokenizer_vocab=256), {"model__weights": "folder"}, "model.weights", "a token would be a byte"),
    (TINY, Host(workers=3, local_workers=3), {"mesh__dp": 2}, "mesh.dp", "is 4 ranks, but 3 processes were started"),
    (TINY, Host(workers=5, local_workers=5), {"mesh__dp": 2}, "mesh.dp", "5 processes were started; fix: start 4 "),
    (TINY, Host(gpus=2, workers=4, local_workers=4), {"train__device": "cuda"}, "train.device",
     "this host has 2 and would run 4 ranks; fix: fewer processes on each host"),
    (TINY, Host(cores=2), {"mesh__dp": 9}, "mesh.dp", "is 18 processes that would compute on this host's CPU cores"),
    (TINY, Host(gpus=2), {"train__device": "cuda"}, "train.device", "this host has 2 and would run 4 ranks"),
    (TINY, Host(gpus=4), {"train__transport": "gloo"}, "train.transport", "moves CPU memory only"),
    (TINY, Host(gpus=2, workers=4, local_workers=2), {"train__transport": "copy_engine"}, "train.transport",
     "of one host"),
    (TINY, Host(gpus=4, no_peer_memory="GPU 0 is far"), {"splits": "device"}, "overlap.ep.splits", "is far"),
    (TINY, Host(gpus=4, no_copy_engine="NCCL is old"), {"train__transport": "copy_engine"}, "train.transport",
     "is old"),
    (TINY, Host(gpus=4), {"precision__compute": "fp32", "splits": "device"}, "overlap.ep.splits", "of experts in fp32"),
    (TINY, Host(gpus=4, gpu="A100", capability=(8, 0)), {"precision__compute": "fp8"}, "precision.compute", "A100 has"),
    (changed(TINY, mesh__dp=4, mesh__ep=4), Host(gpus=2, workers=8, local_workers=2), {"splits": "device"},
     "overlap.ep.splits", "not all on one"),
    (changed(TINY, mesh__dp=4, mesh__ep=8, mesh__tp=2), Host(gpus=4, workers=16, local_workers=4),
     {"splits": "device"}, "overlap.ep.splits", "not all on one"),
    (TINY, Host(workers=4, local_workers=2), {"network__ranks_per_host": 4}, "network.ranks_per_host",
     "of 4 processes only 2 are on this host"),
    (TINY, Host(workers=6, local_workers=4), {"mesh__dp": 3}, "mesh.dp", "so others have another number"),
    (TINY, Host(tokenizer_vocab=300), {"model__vocab": 256}, "model.vocab", "has 300 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "settings", "setting", "reason"), REFUSED)
def test_a_bad_setting_is_refused_with_value_origin_reason_and_fix(base, settings, setting, reason):
    check_message(refused(base, **settings), setting, reason)


@pytest.mark.parametrize(("base", "host", "settings", "setting", "reason"), WITH_HOST)
def test_a_setting_that_the_host_cannot_serve_is_refused(base, host, settings, setting, reason):
    check_message(refused(base, host, **settings), setting, reason)


def check_message(text: str, setting: str, reason: str) -> None:
    lines = [line for line in text.splitlines() if reason in line]
    assert lines, text
    assert re.match(rf"\s*{re.escape(setting)} = .+ \(command line, --{re.escape(setting)}\): .+; fix: .+", lines[0]), (
        text
    )


def test_a_link_per_group_or_one_for_all():
    all_slow = TrainConfig(slow=("100ms",)).slow_links()
    assert all_slow.keys() == set(get_args(Purpose)) - {"control"}
    assert set(all_slow.values()) == {(0.1, math.inf)}
    some = TrainConfig(slow=("a2a:100ms,1GB/s", "control:1GB/s", "pp_fwd:1ms")).slow_links()
    assert some == {"a2a": (0.1, 1e9), "control": (0.0, 1e9), "pp_fwd": (1e-3, math.inf)}


def test_every_rule_can_be_broken():
    cases = [(changed(base, **settings), Host()) for base, settings, _, _ in REFUSED]
    cases += [(changed(base, **settings), host) for base, host, settings, _, _ in WITH_HOST]
    unused = {i for i, rule in enumerate(CHECKS) if not rule.remark}
    for config, host in cases:
        if impossible(config, {}):
            continue
        resolved = choose_all(config, host)
        unused -= {i for i, rule in enumerate(CHECKS) if rule.broken(resolved, host)}
    assert not unused, [CHECKS[i].reason for i in unused]


def choose_all(config: Config, host: Host) -> Config:
    from hocket.resolve import CHOICES

    for setting, choose in CHOICES:
        if leaf(config, setting) in ("auto", ""):
            config = replaced(config, {setting: choose(config, host)[0]})
    return config


def test_one_microbatch_could_be_two_of_half_the_size():
    one = changed(ONE_STAGE, merge="auto", train__microbatches=1, train__sequences=4)
    reason = next(d.reason for d in resolve(one).decisions if d.setting == "overlap.ep.merge")
    assert "2 with train.sequences = 2" in reason
    odd = resolve(changed(one, train__sequences=1)).decisions
    assert not any("train.sequences" in d.reason for d in odd)


def test_all_problems_are_reported_at_once():
    text = refused(TINY, model__heads=5, model__experts=7, plan__chunks=6, train__min_lr=1.0)
    assert text.startswith("4 settings cannot work:\n")
    assert len(text.splitlines()) == 5


def test_the_origin_is_the_recipe_unless_a_flag_is_involved():
    with pytest.raises(ValueError, match=re.escape("model.experts = 7 (recipe odd)")):
        resolve(changed(TINY, model__experts=7), None, {"": "recipe odd"})
    with pytest.raises(ValueError, match=re.escape("mesh.ep = 2 (command line, --mesh.ep)")):
        resolve(changed(TINY, model__experts=7), None, {"": "recipe odd", "mesh.ep": flag("mesh.ep")})


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(TINY.model, "hidden", 1)  # noqa: B010
