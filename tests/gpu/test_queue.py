"""Queues on a GPU: work beside the caller's, ordered by tickets alone."""

import pytest
import torch

from hocket.fsdp.buffers import FullBuffer, StagingMemory
from hocket.runtime.queue import Queue

pytestmark = pytest.mark.gpu
N = 1 << 22
SPIN = 20_000_000
"""Clock cycles, some 10 ms: longer than the host takes for anything here."""


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def issuing(fn, *args):
    """Work that returns nothing."""

    def work():
        fn(*args)

    return work


def slow_fill(out, value):
    def work():
        torch.cuda._sleep(SPIN)
        out.fill_(value)

    return work


def test_tickets_order_and_nothing_else_waits(device):
    gather, reduce = Queue("gather", device), Queue("reduce", device)
    a, b = torch.zeros(N, device=device), torch.zeros(N, device=device)
    torch.cuda.synchronize()
    first = gather.submit("a", slow_fill(a, 1))
    early = a.clone()  # no stream has waited: the fill is still to come
    second = reduce.submit("b", issuing(b.copy_, a), [first])
    assert not first.done
    second.wait()
    late = b.clone()
    torch.cuda.synchronize()
    assert not early.any()
    assert (late == 1).all()


def test_a_mark_holds_a_queue_back_until_the_caller_has_read(device):
    queue, out = Queue("gather", device), torch.ones(N, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    read = out.clone()
    mark = queue.mark("read")
    queue.submit("overwrite", issuing(out.fill_, 2), [mark])
    queue.join()
    after = out.clone()
    torch.cuda.synchronize()
    assert (read == 1).all()
    assert (after == 2).all()


def test_staging_buffers_are_written_behind_their_last_reduction(device):
    queue = Queue("reduce", device)
    staging = StagingMemory(2, torch.float32, device, queue.caller)
    sums = torch.zeros(6, device=device)
    for i in range(6):
        buffer = staging.take(N)
        buffer.fill_(i)

        def work(i=i, buffer=buffer):
            torch.cuda._sleep(SPIN // 10)
            sums[i] = buffer.mean()

        staging.give(buffer, queue.submit(f"reduce {i}", work, [queue.mark(f"staged {i}")]))
    queue.join()
    assert sums.tolist() == [0, 1, 2, 3, 4, 5]
    assert staging.nbytes == 2 * 4 * N


def test_dynamic_memory_is_handed_on_in_the_order_of_the_queue(device):
    """Two units take turns in memory of one unit's size; each reads its own weights."""
    queue = Queue("gather", device)
    buffers = [FullBuffer(N, torch.float32, device) for _ in range(2)]
    seen = []
    for i in range(8):
        buffer = buffers[i % 2]

        def gather(i=i, buffer=buffer):
            buffer.allocate()
            buffer.flat.fill_(i)

        queue.submit(f"gather {i}", gather).wait()
        torch.cuda._sleep(SPIN // 10)
        seen.append(buffer.flat.mean())
        queue.submit(f"free {i}", buffer.free, [queue.mark(f"release {i}")])
    queue.join()
    assert [value.item() for value in seen] == list(range(8))
