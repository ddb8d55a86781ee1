"""Buffers of full size: memory that comes and goes under bound views, and the ring of staging buffers."""

import pytest
import torch
from torch import nn

from hocket.fsdp.buffers import FullBuffer, StagingRing
from hocket.runtime.queue import History, Queue
from hocket.runtime.transports import Pending

CPU = torch.device("cpu")


def ring(count=2, grow=False):
    return StagingRing(count, 100, torch.bfloat16, CPU, grow)


def reduction(queue, log, name):
    return queue.submit(name, lambda: Pending(lambda: log.append(name)))


def test_dynamic_memory_comes_and_goes_under_bound_views():
    buffer = FullBuffer.dynamic(100, torch.float32, CPU)
    assert not buffer.is_fixed
    assert not buffer.allocated
    assert buffer.nbytes == 400
    buffer.allocate()
    param = nn.Parameter(torch.empty(3, 4))
    param.data = buffer.flat[10:22].view(3, 4)
    shifted = param.t()  # what autograd saves of a linear layer
    for value in (1.0, 2.0):
        buffer.free()
        assert buffer.flat.untyped_storage().nbytes() == 0
        buffer.allocate()
        buffer.allocate()
        buffer.flat.fill_(value)
        assert (param == value).all()
        assert (shifted == value).all()


def test_fixed_memory_stays():
    buffer = FullBuffer.fixed(100, torch.bfloat16, CPU)
    pointer = buffer.flat.data_ptr()
    assert 0.01 < buffer.flat.float().std() < 0.03
    buffer.free()
    buffer.allocate()
    assert buffer.is_fixed
    assert buffer.allocated
    assert buffer.flat.data_ptr() == pointer
    assert buffer.nbytes == 200


def test_a_ring_makes_buffers_when_needed_and_reuses_the_one_given_back_first():
    log, queue, staging = [], Queue("reduce", CPU), ring()
    assert staging.made == 0
    a = staging.take("a")
    assert staging.made == 1
    staging.give(a, reduction(queue, log, "reduce a"))
    b = staging.take("b")  # a is being reduced, so a new one
    assert staging.made == 2
    assert staging.nbytes == 400
    staging.give(b, reduction(queue, log, "reduce b"))
    assert not log
    assert staging.take("c") is a  # waits for that one only
    assert log == ["reduce a"]
    staging.give(a, None)
    assert staging.take("d") is a
    assert staging.take("e") is b
    assert log == ["reduce a", "reduce b"]
    assert staging.made == 2


def test_a_ring_does_not_grow_while_old_buffers_are_done():
    log, queue, staging = [], Queue("reduce", CPU), ring(count=4)
    buffer = staging.take("a")
    staging.give(buffer, reduction(queue, log, "reduce a"))
    queue.join()
    assert staging.take("b") is buffer
    assert staging.made == 1


def test_the_caller_waits_for_one_reduction_only():
    history = History()
    queue, other = Queue("reduce", CPU, history), Queue("other", CPU, history)
    staging = ring(count=1)
    buffer = staging.take("a")
    staging.give(buffer, reduction(queue, [], "reduce a"))
    reduction(other, [], "outer a")
    staging.take("b")
    written = history.note("backward b")
    assert history.before(history.one("reduce a"), written)
    assert history.concurrent(history.one("outer a"), written)


def test_a_full_ring_names_who_holds_it():
    staging = ring()
    staging.take("unit 'layers.0'")
    staging.take("unit 'layers.1'")
    with pytest.raises(ValueError, match=r"unit 'layers.2' needs .* all 2 .* of unit 'layers.0', unit 'layers.1':.*=2"):
        staging.take("unit 'layers.2'")


def test_a_ring_may_grow():
    staging = ring(count=1, grow=True)
    taken = [staging.take(i) for i in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    assert staging.grown == 2
    for buffer in taken:
        staging.give(buffer, None)
    assert {staging.take(i).data_ptr() for i in range(3)} == {buffer.data_ptr() for buffer in taken}
    assert staging.grown == 2


def test_a_ring_can_be_made_at_once():
    entered = []

    class Window:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    staging = ring()
    staging.allocate(Window())
    assert staging.made == 2
    assert entered == [True, False]
    staging.take("a")
    staging.take("b")
    assert staging.made == 2


def test_a_ring_of_nothing_is_refused():
    with pytest.raises(ValueError, match="staging=0"):
        ring(count=0)
