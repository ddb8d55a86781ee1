"""`plan_model`: another author's model, trained by a planned step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.adapters.costs import price_of, sizes_of
from hocket.adapters.source import ELSE, WHOLE, AdaptedModel, OwnModel, Values, refuse
from hocket.adapters.transformers import Pretrained, unshareable
from hocket.adapters.verify import verify
from hocket.config import Config
from hocket.config.optimizer import unmatched
from hocket.config.rule import Host, Rule, leaf, problem
from hocket.config.schema import DEFAULTS, changed, ill_typed
from hocket.engine import Engine
from hocket.planned import with_settings
from hocket.pretrained.weights import ModuleFolder, is_pretrained
from hocket.problems import stop_if
from hocket.resolve import resolve
from hocket.rules import rule_lines
from hocket.runtime.world import everyone
from hocket.step import PlannedStep, other_ranks

_AUTOMATIC: dict[str, tuple[Any, Any]] = {
    "plan.graphs": ("off", "auto"),  # a foreign forward may do anything while it is recorded
    "plan.loss_pieces": (1, "auto"),  # the model's own forward makes logits
    "plan.offload": ((), ("auto",)),  # its functions may save weights, which move
}
"""Setting -> its value with another author's model, if it has the second value, which leaves it to hocket."""


def plan_model(
    model: nn.Module,
    settings: Config | Mapping[str, Any] | None = None,
    *,
    values: Values | str | os.PathLike[str] | None = None,
) -> PlannedStep:
    """Plan the training of a model: full sharding, expert parallelism, pipeline, according to `settings`.

    `model` is an unmodified `...ForCausalLM` of transformers 5, or a module with `embed`, `layers` and `head` whose
    layers follow `hocket.adapters.layer`. It is not changed: each rank copies its part of the weights, and
    `PlannedStep.load_into` copies them back. A model on the meta device needs `values`: a function from a parameter's
    name to its initial value, or a folder that `from_pretrained` opens, of which a rank reads only its layers'
    parameters. `settings` are a `Config`, or values by dotted name, `{"mesh.dp": 8}`; sizes of the model come from the
    model. With several ranks the default process group must exist.

    Raises ValueError, before anything is allocated, if the model or the settings cannot be planned.
    """
    if isinstance(values, str | os.PathLike):
        try:
            values = ModuleFolder.of(Path(values), model).value
        except ValueError as error:
            raise ValueError(f"values = {values}: {error}; fix: the folder of such a model") from None
    if values is not None and not callable(values):
        raise ValueError(f"values = {type(values).__name__}: no function; fix: such as values=tensors.__getitem__")
    config, given = _configured(settings)
    source = _adapted(model)
    source.values = values
    _check(source, config, given)
    _check_widths(source, changed(config, {"precision.compute": "fp32"}))  # the dtype in which layers are compared
    shared, packed = config.mesh.cp > 1, config.data.packing != "off"
    top_k = verify(source, shared or packed)
    config = replace(config, model=sizes_of(source, top_k))
    price = price_of(source)
    config = changed(config, {name: value for name, (value, left) in _AUTOMATIC.items() if leaf(config, name) == left})
    resolved = resolve(config, _host(), given, price)
    on_gpu = resolved.train.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    stop_if(unmatched(resolved.optimizer, [(name, source.theirs[name]) for name in source.params], given))
    _check_device(source, device)
    _check_widths(source, resolved)
    if values is None:
        _check_alike(source)
    rank = dist.get_rank() if dist.is_initialized() else 0
    source.method = resolved.overlap.cp.method if shared else WHOLE if packed else ""
    engine = Engine(resolved, rank, device, source=source)
    engine.init_weights()
    names = {name: (source.theirs[name], param.shape) for name, param in source.params.items()}
    return PlannedStep(engine, resolved, price, names, *_untrained_state(source, source.buffers(device)))


def _untrained_state(source: AdaptedModel, buffers: Mapping[int, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state besides trained parameters, as the step has it, and aliases of these parameters -> names."""
    state: dict[str, Any] = source.model.state_dict(keep_vars=True)
    known = {id(param): source.theirs[name] for name, param in source.params.items()}
    others = {name: known[id(x)] for name, x in state.items() if id(x) in known and known[id(x)] != name}
    return {name: buffers[id(x)].detach() for name, x in state.items() if id(x) in buffers}, others


def _adapted(model: nn.Module) -> AdaptedModel:
    if is_pretrained(model):
        return Pretrained(model)
    if all(hasattr(model, name) for name in ("embed", "layers", "head")):
        return OwnModel(model)
    raise refuse(model, "it is no model of transformers, and has no embed, layers and head")


def _configured(settings: Config | Mapping[str, Any] | None) -> tuple[Config, dict[str, str]]:
    if isinstance(settings, Config):
        stop_if(ill_typed(settings, {"": "plan_model"}))
        return settings, {}
    config, given = with_settings(DEFAULTS, settings, "plan_model")
    stop_if(
        [
            problem(name, leaf(config, name), given, "the model itself says that", "leave it out")
            for name in given
            if name.startswith("model.")
        ]
    )
    return config, given


_RULES = (
    Rule(("mesh.tp",), lambda c, h: c.mesh.tp > 1, "heads of a model of others stay together", "mesh.tp = 1"),
    Rule(
        ("plan.loss_pieces",),
        lambda c, h: c.plan.pieces > 1,
        "a model of others makes its logits itself",
        "plan.loss_pieces = 1",
    ),
    Rule(
        ("plan.offload",),
        lambda c, h: bool(c.plan.offload),
        "functions of others may save weights, which lie elsewhere by the time of the copy",
        "leave plan.offload out, or plan.recompute",
    ),
    Rule(
        ("precision.compute",),
        lambda c, h: c.precision.compute == "fp8",
        "layers of others have products of their own",
        "precision.compute = bf16",
    ),
    Rule(
        ("plan.graphs", "data.packing"),
        lambda c, h: c.data.packing != "off" and c.plan.graphs == "on",
        "what layers of others are told of documents is made anew for each microbatch, and no recorded step serves "
        "another one",
        "plan.graphs = off, or data.packing = off",
    ),
    Rule(
        ("optimizer.name",),
        lambda c, h: c.optimizer.name == "muon",
        "which weights of a model of others are several matrices in one is not known",
        "optimizer.name = adamw",
    ),
)
"""Rules for other authors' layers, in addition to the rules of all settings."""


def _check(source: AdaptedModel, config: Config, given: Mapping[str, str]) -> None:
    model, problems = source.model, other_ranks(config)
    reason = unshareable(model) if config.mesh.cp > 1 or config.data.packing != "off" else ""
    whole = (
        Rule(("mesh.cp",), lambda c, h: c.mesh.cp > 1 and bool(reason), reason, "mesh.cp = 1"),
        Rule(("data.packing",), lambda c, h: c.data.packing != "off" and bool(reason), reason, "data.packing = off"),
    )
    broken = [rule for rule in (*_RULES, *whole) if rule.broken(config, Host())]
    problems += rule_lines(broken, config, Host(), {"": "plan_model", **given})
    if source.values is None and any(param.is_meta for param in source.params.values()):
        problems.append(str(refuse(model, "its parameters are on the meta device", "plan_model(..., values=...)")))
    stop_if(problems)


def _check_device(source: AdaptedModel, device: torch.device) -> None:
    for name, param in source.params.items():
        if param.device.type not in ("cpu", "meta") and param.device != device:
            reason = f"{source.theirs[name]} is on {param.device}, and this rank computes on {device}"
            raise refuse(source.model, reason, f"keep the model on the CPU or the meta device, or move it to {device}")


def _check_widths(source: AdaptedModel, config: Config) -> None:
    """Raise ValueError unless rows of experts' products are multiples of 16 bytes."""
    unit = 16 // config.element_bytes
    for name, param in source.params.items():
        if ".experts." in name and param.dim() > 2 and any(width % unit for width in param.shape[1:]):
            raise refuse(
                source.model,
                f"{source.theirs[name]} has the shape {tuple(param.shape)}, and products of experts in "
                f"{config.precision.compute} need widths of a multiple of {unit}",
                f"other widths; {ELSE}",
            )


def _check_alike(source: AdaptedModel) -> None:
    """Check that all ranks hold the same model, by the first and last element of each parameter."""
    ends = [
        (name, *(float(param.detach().reshape(-1)[i]) for i in (0, -1)))
        for name, param in {**source.params, **source.constants}.items()
        if param.numel()
    ]
    for others in everyone(ends):
        if differing := [name for (name, *mine), (_, *theirs) in zip(ends, others, strict=True) if mine != theirs]:
            reason = f"ranks hold different weights, such as {source.theirs[differing[0]]}"
            raise refuse(source.model, reason, "torch.manual_seed before the model is made, or the same checkpoint")


def _host() -> Host:
    """The host as a running rank sees it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Host(workers=ranks, local_workers=ranks)
    first = torch.cuda.get_device_properties(torch.cuda.current_device())
    local = ranks if ranks <= gpus else gpus
    unknown = "not checked: plan_model uses what the running ranks already have"
    return Host(
        gpus=gpus, gpu=first.name, memory=first.total_memory, workers=ranks, local_workers=local,
        no_copy_engine=unknown, no_peer_memory=unknown,
    )  # fmt: skip
