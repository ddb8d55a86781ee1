"""Which transport a group on GPUs gets, from what it is for.

Results alone would not tell if one fell back to NCCL's kernels.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from hocket.config import COPIED, Purpose
from hocket.runtime import comm as group_transport
from hocket.runtime.collective_copies import CopiedCollectives
from hocket.runtime.comm import CommOptions, make_transport
from hocket.runtime.p2p_copies import CopiedHops
from hocket.runtime.peer_rows import CopiedRows, PushedRows
from hocket.runtime.tokens import CopyingNccl
from hocket.runtime.transports import Nccl

COPIES = {"a2a": CopiedRows, "pp_fwd": CopiedHops, "pp_bwd": CopiedHops}
"""What copies for a purpose that is no collective."""


@pytest.fixture(autouse=True)
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """That needs a GPU: memory of peers, options of NCCL, a group."""

    copies = ("push_buffers", "peer_copies", "p2p_copies", "copied_tokens", "collective_copies")
    for name in (*copies, "SideStream", "nccl_options"):
        monkeypatch.setattr(group_transport, name, lambda *_: None)
    group = dist.ProcessGroup(0, 2)  # pyrefly: ignore
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: group)


def made(purpose: Purpose, name: Any, **options: Any) -> Any:
    return make_transport(purpose, (0, 1), 0, torch.device("cpu"), name, CommOptions(**options))


@pytest.mark.parametrize("name", ["nccl", *COPIED])
@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_copies_move_what_a_transport_says_that_they_move(purpose: Purpose, name: str) -> None:
    found = made(purpose, name)
    copied = purpose in COPIED.get(name, ())
    assert type(found) is (COPIES.get(purpose, CopiedCollectives) if copied else Nccl)


@pytest.mark.parametrize("name", ["nccl", *COPIED])
def test_rows_of_device_known_splits_are_stored_and_tokens_copied_on_any(name: str) -> None:
    assert type(made("a2a", name, device_splits=True)) is PushedRows
    assert type(made("tp", name, tokens=1)) is CopyingNccl


def test_copy_engines_move_all_but_tokens_and_what_ranks_agree_on() -> None:
    assert set(get_args(Purpose)) - set(COPIED["copy_engine"]) == {"tp", "control", "replicas"}
