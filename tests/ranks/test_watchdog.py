"""What a rank that stands still says of the others."""

import pytest

from omnibal.ranks import watchdog
from omnibal.ranks.failures import Watch

PLACES = ["rank 0, stage 0", "rank 1, stage 1", "rank 2, stage 2"]


class Answering(dict):
    """A store that answers at once."""

    set, get = dict.__setitem__, dict.__getitem__

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(watchdog, "monotonic", lambda: now[0])
    yield now
    watchdog.WORK.note = None


def standing(rank, clock, *others):
    """The watchdog of a rank that has waited for three of four seconds, and its store, where others have left word."""
    watchdog.WORK.note = None
    dogs, store = [watchdog.Watchdog(each, PLACES, lambda *_: "", 4.0) for each in (*others, rank)], Answering()
    for dog in dogs:
        dog.is_closed = True  # its thread has nothing to say here
    watchdog.WORK.at("RecvGrad", 0, waits=True)
    clock[0] += 3
    for dog in dogs:
        dog.visit(store)
    return dogs[-1]


def test_a_store_that_does_not_answer_names_the_rank_that_holds_it(clock):
    dog = standing(1, clock, 0, 2)
    assert "does not answer" not in dog._cause(clock[0])
    clock[0] += 2  # the watch asks the store whether a rank has failed, and waits for the answer
    assert dog._cause(clock[0]).startswith("rank 0, stage 0 does not answer: it is stopped, or its host is gone")


def test_a_rank_that_never_left_word_is_named_before_those_that_wait(clock):
    dog = standing(0, clock, 2)
    assert dog._cause(clock[0]) == "rank 1, stage 1 has left no word yet"


def test_a_rank_leaves_word_before_its_first_step(clock):
    watch, store = object.__new__(Watch), Answering()
    watch._store, watch._dog = store, None
    dog = watchdog.Watchdog(1, PLACES, lambda *_: "", 4.0)
    dog.is_closed = True
    watch.keep(dog)
    assert [*store] == [watchdog.BEAT.format(1)]
