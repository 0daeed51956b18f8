"""What NCCL makes of the transfers that processes start: a model that shows whether all of them end.

Everything that happens is a node of a graph, and needs others to have happened before. Which ones does not depend on
times, so a run ends in a deadlock exactly where the graph has a circle. Each rule only adds such needs: what ends under
all rules together ends under any of them.
"""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Literal, NamedTuple


class Kernel(NamedTuple):
    """The host launches a computation on the device's own stream."""

    name: str


class Post(NamedTuple):
    """The host starts a transfer; the device's run on their communicator's stream, behind what is computed so far."""

    group: int
    peer: int
    sends: bool
    on_device: bool


class Wait(NamedTuple):
    """What is computed from here on needs a transfer, named by its place; the host waits only for one of its own."""

    post: int


Program = list[Kernel | Post | Wait]


class Rules(NamedTuple):
    """What is otherwise from machine to machine and from moment to moment.

    Attributes:
        lazy: A communicator is made for each pair at its first transfer, where both hosts wait for each other. The
            pairs of a group have one in common otherwise, which is there from the beginning.
        drains: Where the host waits for all that its device has to do: to load a kernel, or to get memory freed.
        transfers_hold: No computation starts while a transfer that was started before waits for its other end.
    """

    lazy: bool
    drains: Literal["nowhere", "after forward passes", "everywhere"]
    transfers_hold: bool


MILDEST = Rules(lazy=False, drains="nowhere", transfers_hold=False)
STRICTEST = [Rules(lazy, "everywhere", transfers_hold=True) for lazy in (False, True)]
ALL_RULES = list(
    map(Rules._make, product((False, True), ("nowhere", "after forward passes", "everywhere"), (False, True)))
)


def deadlock(programs: list[Program], rules: Rules) -> list[str]:
    """A circle of events, each of which waits for the one before it; none where all programs end."""
    needs = defaultdict(set)
    ends = _other_ends(programs)
    for rank, program in enumerate(programs):
        _Process(rank, program, rules, needs, ends).run()
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return [f"rank {rank}, {event} of {programs[rank][place]}" for event, rank, place in error.args[1]]
    return []


def _other_ends(programs):
    """Of each transfer (rank, place in its program): between two ranks of a group, each way, they meet in order."""
    places = defaultdict(list)
    for rank, program in enumerate(programs):
        for place, action in enumerate(program):
            if isinstance(action, Post):
                way = (rank, action.peer) if action.sends else (action.peer, rank)
                places[action.group, way, action.sends].append((rank, place))
    ends = {}
    for (group, way, sends), found in places.items():
        ends |= zip(found, places[group, way, not sends], strict=True)
    return ends


class _Process:
    """One process's nodes: its host goes from action to action, its device's streams from one to the next."""

    def __init__(self, rank, program, rules, needs, ends):
        self.rank, self.program, self.rules, self.needs, self.ends = rank, program, rules, needs, ends
        self.host = None  # the last thing that it has done
        self.computed = set()  # what the stream of computations comes behind
        self.streams = {}  # of each communicator the last transfer

    def run(self):
        for place, action in enumerate(self.program):
            if isinstance(action, Wait) and self.program[action.post].on_device:
                self.computed = self.computed | {("end", self.rank, action.post)}
                continue
            begun, passed = ("begin", self.rank, place), ("return", self.rank, place)
            self.needs[begun] |= {self.host} - {None}
            self.needs[passed].add(begun)
            getattr(self, f"_{type(action).__name__.lower()}")(place, action, begun, passed)
            if self.rules.drains == "everywhere" or (self.rules.drains != "nowhere" and action == Kernel("F")):
                self.needs[passed] |= {*self.computed, *self.streams.values()}
            self.host = passed

    def _kernel(self, place, action, begun, passed):
        end = ("end", self.rank, place)
        self.needs[end] |= {begun, *self.computed, *(self.streams.values() if self.rules.transfers_hold else ())}
        self.computed = {end}

    def _post(self, place, action, begun, passed):
        start, end = ("start", self.rank, place), ("end", self.rank, place)
        other = self.ends[self.rank, place]
        self.needs[start].add(begun)
        self.needs[end] |= {start, ("start", *other)}
        if action.on_device:
            stream = (action.group, action.peer) if self.rules.lazy else action.group
            self.needs[start] |= self.computed | ({self.streams[stream]} if stream in self.streams else set())
            if self.rules.lazy and stream not in self.streams:
                self.needs[passed].add(("begin", *other))
            self.streams[stream] = end

    def _wait(self, place, action, begun, passed):
        self.needs[passed].add(("end", self.rank, action.post))
