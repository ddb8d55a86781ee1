"""Saving and loading what `hocket.fully_shard` has sharded.

    context = hocket.fully_shard(model, ...)                        # or the model itself, in the place of its context
    hocket.checkpoint.save(context, optimizer, "checkpoints/10")
    hocket.checkpoint.load(context, optimizer, "checkpoints/10")    # on any number of ranks

`model_state` and `optimizer_state` are the same as dictionaries of whole tensors.
"""

from hocket.fsdp.saving.checkpoint import load, save
from hocket.fsdp.saving.optimizer_state import load_optimizer_state, optimizer_state
from hocket.fsdp.saving.state import load_model_state, model_state

__all__ = ["load", "load_model_state", "load_optimizer_state", "model_state", "optimizer_state", "save"]
