"""A small sharded model of every class of units, for tests that drive units by hand."""

import torch
from torch import nn

from hocket.fsdp.planned.model import PlannedModel
from hocket.program.ops import Layout, Program
from hocket.runtime.comm import TransportName, make_groups
from hocket.runtime.weights import WgradQueue

CPU = torch.device("cpu")
EXPERTS = 4
SHAPES = {
    "embed.weight": (37, 24),
    "layers.0.attn.norm": (24,),
    "layers.0.attn.wq": (40, 24),
    "layers.0.mlp.w": (24, 65),
    "layers.1.attn.norm": (24,),
    "layers.1.attn.wq": (40, 24),
    "layers.1.router.weight": (EXPERTS, 24),
    "layers.1.experts.w_up": (EXPERTS, 24, 33),
    "layers.1.experts.w_down": (EXPERTS, 33, 24),
    "head.norm": (3,),
}
SLOTS = {"embed": 1, "dense": 2, "experts": 2, "head": 1}
PLACES = [("embed", 0, -1), ("dense", 0, 0), ("dense", 0, 1), ("experts", 0, 1), ("head", 0, -1)]


def build_module(ep):
    """A module whose parameters have the names and shapes above, on the meta device; experts split over `ep`."""
    root = nn.Module()
    for name, shape in SHAPES.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        local = (shape[0] // ep, *shape[1:]) if ".experts." in name else shape
        module.register_parameter(leaf, nn.Parameter(torch.empty(local, device="meta")))
    return root


def tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def build(rank, mesh, dtype=torch.float32, transport: TransportName = "gloo"):
    groups = make_groups(mesh, rank, CPU, transport)
    program = Program(Layout(("dense", "moe"), ep=mesh.ep), 1, (), weight_slots=SLOTS, grad_slots=SLOTS)
    model = PlannedModel([build_module(mesh.ep)], mesh, groups, program, dtype, CPU)
    for slots in (*model.weight_slots.values(), *model.grad_slots.values()):
        for buffer in slots.buffers:
            buffer.fill_(float("nan"))  # a read of memory that was not written gives nan
    return model, groups


def local_of(full, weight, model):
    """This rank's slice of a whole tensor: the tensor itself, or its local experts."""
    if full.shape == weight.shape:
        return full
    return full.chunk(model.groups.a2a.size)[model.groups.a2a.rank]


def add_grads(model, grads, slot=0, microbatch=0):
    """One microbatch: write every gradient, reduce every unit."""
    for unit in model.units.values():
        give(unit, {weight: local_of(grads[weight.name], weight, model) for weight in unit.weights}, slot, microbatch)


def give(unit, gradients, slot=0, microbatch=0):
    """One microbatch of one unit: write its gradients, and reduce them."""
    if unit.alone:
        queue = WgradQueue()
        for weight, gradient in gradients.items():
            queue.push(weight, lambda out, gradient=gradient: out.copy_(gradient))
        unit.collect(queue, microbatch)
        unit.complete()
        return
    views = unit.grad_views(slot)
    for weight, gradient in gradients.items():
        views[weight].copy_(gradient)
    unit.zero_missing(slot, gradients.keys())
    unit.reduce(slot).wait()
