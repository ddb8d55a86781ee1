"""Names that go with `hocket.fully_shard`."""

from hocket.fsdp.api import param_groups, unit_of
from hocket.fsdp.shard_groups import Placement
from hocket.fsdp.update import step_and_gather

__all__ = ["Placement", "param_groups", "step_and_gather", "unit_of"]
