"""Queues, tickets and their history, on a CPU."""

import gc

import pytest
import torch

from benchmarks.history import CALLER, History
from hocket.runtime.queue import Queue, Ticket
from hocket.runtime.transports import Pending

CPU = torch.device("cpu")


class Collective:
    """A collective of which the test decides nothing: it writes down when it starts and when it is waited for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __call__(self):
        self.log.append(f"start {self.name}")
        return Pending(lambda: self.log.append(f"wait {self.name}"))


def test_work_runs_at_once_and_is_waited_for_in_order():
    log, queue = [], Queue("reduce", CPU)
    tickets = [queue.submit(name, Collective(log, name)) for name in "abc"]
    assert log == ["start a", "start b", "start c"]
    assert not any(ticket.done for ticket in tickets)
    tickets[1].wait()
    assert log[3:] == ["wait a", "wait b"]
    assert [ticket.done for ticket in tickets] == [True, True, False]
    tickets[1].wait()
    tickets[0].wait()
    assert log[3:] == ["wait a", "wait b"]
    queue.join()
    assert log[5:] == ["wait c"]


def test_work_without_a_collective_is_done_unless_something_is_before_it():
    log, queue = [], Queue("gather", CPU)
    assert queue.submit("cast", lambda: None).done
    queue.submit("gather", Collective(log, "gather"))
    free = queue.submit("free", lambda: log.append("free"))
    assert log == ["start gather", "free"]  # it ran, but its ticket stands for the gather too
    assert not free.done
    free.wait()
    assert log[2:] == ["wait gather"]
    assert queue.mark("caller").done


def test_work_comes_behind_tickets_of_any_queue():
    log, gather, reduce = [], Queue("gather", CPU), Queue("reduce", CPU)
    one = gather.submit("one", Collective(log, "one"))
    two = reduce.submit("two", Collective(log, "two"), [one])
    reduce.submit("three", Collective(log, "three"), [two, gather.mark("now")])
    assert log == ["start one", "wait one", "start two", "wait two", "start three"]


def test_an_exception_in_work_or_wait_leaves_a_queue_that_can_be_aborted():
    log, queue = [], Queue("gather", CPU)

    def broken():
        raise RuntimeError("peer lost")

    with pytest.raises(RuntimeError, match="peer lost"):
        queue.submit("work", broken)
    first = queue.submit("first", lambda: Pending(broken))
    second = queue.submit("second", Collective(log, "second"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="peer lost"):
            second.wait()
    assert log == ["start second"]
    queue.abort()  # what is under way goes on using its memory, so it is waited for
    assert first.done
    assert second.done
    queue.join()
    queue.submit("third", Collective(log, "third")).wait()
    assert log == ["start second", "wait second", "start third", "wait third"]


def test_tickets_hold_nothing_but_their_queue():
    queue = Queue("gather", CPU)
    queue.submit("a", lambda: Pending(lambda: None))
    queue.join()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Ticket and one._queue is queue]


def test_names_are_in_a_profile():
    queue = Queue("gather", CPU)
    with torch.profiler.profile(acc_events=True) as profile:
        queue.submit("gather layers.3", lambda: Pending(lambda: None))
        queue.join()
    names = {event.name for event in profile.events() or ()}
    assert {"gather layers.3", "wait gather layers.3"} <= names


def recorded():
    history = History()
    return history, history.watch(Queue("gather", CPU)), history.watch(Queue("reduce", CPU))


def test_history_of_a_prefetch():
    """The gather of the next unit runs beside the compute of this one; its memory is used after the last reader."""
    history, gather, _ = recorded()
    first = gather.submit("gather 0", lambda: Pending(lambda: None))
    gather.submit("gather 1", lambda: Pending(lambda: None))
    first.wait()
    compute = history.note("forward 0")
    read = gather.mark("release 0")
    third = gather.submit("gather 2", lambda: None, [read])
    assert history.before(history.one("gather 0"), compute)
    assert history.concurrent(history.one("gather 1"), compute)
    assert history.before(compute, history.one("gather 2"))
    assert not history.concurrent(compute, compute)
    assert history.one("gather 2").after == ("release 0",)
    assert history.one("gather 2") is history.entry_of[third]
    assert [e.name for e in history.entries if e.queue == CALLER] == ["wait gather 0", "forward 0", "release 0"]


def test_history_knows_queues_and_joins():
    history, gather, reduce = recorded()
    gather.submit("a", lambda: None)
    reduce.submit("b", lambda: None)
    a, b = history.one("a"), history.one("b")
    assert history.concurrent(a, b)
    gather.submit("c", lambda: None)
    reduce.submit("d", lambda: None)
    after = history.note("before the join")
    reduce.join()
    behind = history.note("optimizer")
    assert history.concurrent(history.one("d"), after)
    assert history.before(history.one("d"), behind)
    assert history.before(a, history.one("c"))
    assert history.waits() == ["join reduce"]
    assert history.last("reduce") is history.one("d")


def test_history_counts_a_ticket_that_was_done_as_waited_for():
    """On a GPU it would not have been: the record is the same everywhere."""
    history, gather, _ = recorded()
    ticket = gather.submit("cast", lambda: None)
    assert ticket.done
    ticket.wait()
    ticket.wait()
    assert history.waits() == ["wait cast"]
    assert history.before(history.one("cast"), history.note("forward"))


def test_history_finds_by_number_and_forgets():
    history, gather, _ = recorded()
    for _ in range(3):
        gather.submit("gather 0", lambda: None)
    assert [entry.index for entry in history.all("gather 0")] == [0, 1, 2]
    assert history.one("gather 0", -1).index == 2
    with pytest.raises(AssertionError, match="nothing is named 'gather 1'"):
        history.one("gather 1")
    history.clear()
    assert not history.entries
    gather.submit("gather 0", lambda: None)
    assert history.one("gather 0").index == 0
