"""The loaders of a run's ranks on streams, as threads of one process: what each stage gets, and where all go on."""

import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from omnibal.cluster import Layout
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture
from omnibal.engine import samples
from omnibal.engine.loader import Loader
from omnibal.engine.reading import PackReader
from omnibal.engine.samples import PipelineStreamFeed, SampleRules
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.buffer import StreamSettings
from omnibal.vlm import load_model
from tests.engine.small import PIXEL_SHAPE, small_config
from tests.engine.streaming import Counting, Finite, sample, sources

LIMITS, STEPS, STAGES, REPLICAS = PackLimits(4, 48), 12, 3, 2
READER = PackReader(view="images", pixel_shape=PIXEL_SHAPE)
RULES = SampleRules.of(load_model(small_config()))
LAYOUT = Layout(STAGES, REPLICAS)
MIXTURE = Mixture({"stateful": 0.5, "indexed": 0.2, "stateless": 0.3})


class Group:
    """Where ranks tell each other something, and send tensors."""

    def __init__(self, size):
        self._told, self._met = [None] * size, threading.Barrier(size, timeout=60)
        self.sent = {pair: queue.SimpleQueue() for pair in itertools.product(range(size), repeat=2)}

    def tell(self, rank, told):
        self._told[rank] = told
        self._met.wait()
        heard = [*self._told]
        self._met.wait()
        return heard


class Ranks:
    """What torch.distributed is to threads, each of which is a rank; a group goes with the rank that has it."""

    def __init__(self, monkeypatch, size=STAGES * REPLICAS):
        self.size = size
        self._local, self._between_steps = threading.local(), Group(self.size)
        found = {name: getattr(self, name) for name in ("send", "recv", "get_rank")}
        monkeypatch.setattr(samples, "dist", SimpleNamespace(**found))
        monkeypatch.setattr(samples, "gather", self.gather)

    def get_rank(self):
        return self._local.rank

    def gather(self, told, group=None):
        rank, group = group or (self.get_rank(), self._between_steps)
        heard = group.tell(rank, told)
        for number, value in enumerate(heard):
            if isinstance(value, Exception):
                raise type(value)(f"rank {number}: {value}")
        return heard

    def send(self, tensor, to, group):
        rank, group = group
        group.sent[rank, to].put(tensor)

    def recv(self, tensor, sender, group):
        rank, group = group
        tensor.copy_(group.sent[sender, rank].get(timeout=60))

    def run(self, work):
        """What ``work`` gives, which makes a loader on each rank."""
        group = Group(self.size)

        def of_rank(rank):
            self._local.rank = rank
            return work((rank, group))

        with ThreadPoolExecutor(self.size) as pool:
            return [*pool.map(of_rank, range(self.size))]


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def loader_of(place, found=None, mixture=MIXTURE, steps=STEPS, oversized="alone", layout=LAYOUT, micro_batches=2):
    settings = StreamSettings(
        limits=LIMITS, micro_batches=micro_batches, buffer=24, mixture=mixture, num_steps=steps, oversized=oversized
    )
    found, place_of = sources() if found is None else found, layout.position(place[0])
    feed = PipelineStreamFeed(found, settings, layout=layout, place=place_of, reader=READER, rules=RULES)
    feed._group = place
    return Loader(feed, None)


def taken(loader, steps):
    return [
        (
            *(step.index, step.num_samples, step.load.llm_tokens.tolist(), dict(step.shares)),
            *([_plain(batch) for batch in batches], step.epoch),
        )
        for step, batches in itertools.islice(loader, steps)
    ]


def _plain(batch):
    return {name: tensor.tolist() for name, tensor in batch.items() if name in ("input_ids", "labels")}


def test_the_first_stage_reads_packs_the_last_one_their_labels_those_between_nothing(ranks):
    of_ranks = ranks.run(lambda place: taken(loader_of(place), STEPS))
    assert [len(steps) for steps in of_ranks] == [STEPS] * ranks.size
    for steps in zip(*of_ranks, strict=True):
        assert all(step[:4] == steps[0][:4] for step in steps)  # all hear the same
        for replica in range(REPLICAS):
            first, between, last = (steps[stage * REPLICAS + replica][4] for stage in range(STAGES))
            assert between == []
            assert [batch["labels"] for batch in first] == [batch["labels"] for batch in last]
            assert [batch.keys() for batch in last] == [{"labels"}] * 2
    seen = [str(batch["input_ids"]) for rank in range(REPLICAS) for step in of_ranks[rank] for batch in step[4]]
    assert len(set(seen)) == len(seen) == REPLICAS * STEPS * 2


def test_a_list_takes_all_steps_of_a_stream_which_has_no_length(ranks):
    assert [len(steps) for steps in ranks.run(lambda place: list(loader_of(place)))] == [STEPS] * ranks.size


@pytest.mark.parametrize("steps", [0, 1, 5, 11])
def test_ranks_go_on_with_the_samples_that_would_have_followed(ranks, steps):
    whole = ranks.run(lambda place: taken(loader_of(place), STEPS))

    def saved(place):
        loader = loader_of(place)
        taken(loader, steps)
        return loader.state_dict()

    states = ranks.run(saved)

    def resumed(place):
        loader = loader_of(place)
        loader.load_state_dict(states[place[0]])
        return taken(loader, STEPS)

    assert ranks.run(resumed) == [found[steps:] for found in whole]


def test_ranks_of_other_stages_go_on_with_the_same_packs(ranks, monkeypatch):
    def saved(place):
        loader = loader_of(place)
        return taken(loader, 3) and loader.state_dict(), taken(loader, 2)

    found, layout = ranks.run(saved), Layout(2, REPLICAS)

    def resumed(place):
        loader = loader_of(place, layout=layout)
        loader.load_state_dict(found[0][0])
        return taken(loader, 2)

    assert Ranks(monkeypatch, 4).run(resumed) == [steps for _, steps in found[:REPLICAS] + found[-REPLICAS:]]


def samples_in(batch):
    """The tokens of each sample of a pack: one begins where tokens without a label follow such that have one."""
    found, after = [], -100
    for token, label in zip(batch["input_ids"][0], batch["labels"][0], strict=True):
        if not found or label == -100 != after:
            found.append(())
        found[-1], after = (*found[-1], token), label
    return [tokens for tokens in found if tokens != (0,)]  # an empty pack


def trained_in_turns(monkeypatch, turns, found, mixture=None):
    """Epoch and tokens of the samples that other ranks train in turns, three steps behind each resume.

    A turn has so many replicas and micro-batches.
    """
    state, trained = None, []

    def work(layout, micro_batches, state, place):
        loader = loader_of(place, found(), mixture, 999, layout=layout, micro_batches=micro_batches)
        if state is not None:
            loader.load_state_dict(state)
        return taken(loader, 3), loader.state_dict()

    for replicas, micro_batches in turns:
        of_turn = partial(work, Layout(1, replicas), micro_batches, state)
        by_rank = Ranks(monkeypatch, replicas).run(of_turn)
        state = by_rank[0][1]
        steps = [step for steps, _ in by_rank for step in steps]
        trained += [(step[-1], tokens) for step in steps for batch in step[4] for tokens in samples_in(batch)]
    return trained


TURNS = [(2, 2), (3, 2), (1, 4), (4, 1), (4, 2), (2, 2)]


def tokens_of(numbers):
    return sorted(tuple(sample(number)["input_ids"].tolist()) for number in numbers)


@pytest.mark.filterwarnings("ignore:sources without state_dict")
@pytest.mark.parametrize("kind", [Finite, list])
def test_other_replicas_train_each_sample_of_a_pass_once(monkeypatch, kind):
    samples = [sample(number) for number in range(250)]
    trained = trained_in_turns(monkeypatch, [*TURNS, *[(3, 2)] * 5], lambda: {"data": kind(samples)})
    assert sorted(tokens for epoch, tokens in trained if epoch == 0) == tokens_of(range(250))
    assert trained[-1][0] > 0


@pytest.mark.filterwarnings("ignore:sources without state_dict")
def test_other_replicas_go_on_in_a_mixture_without_a_sample_twice_or_left_out(monkeypatch):
    ranges = {"stateful": range(1000, 9000), "indexed": range(2000, 2300), "stateless": range(3000, 3300)}

    def found():
        finite = [[sample(number) for number in ranges[name]] for name in ("indexed", "stateless")]
        return {"stateful": Counting(1000), "indexed": finite[0], "stateless": Finite(finite[1])}

    trained = [tokens for _, tokens in trained_in_turns(monkeypatch, TURNS, found, MIXTURE)]
    assert len(set(trained)) == len(trained)
    known = {tuple(sample(number)["input_ids"].tolist()): number for number in range(1000, 1300)}
    counted = sorted(number for tokens in trained if (number := known.get(tokens)) is not None)
    assert len(counted) > 50
    # What is missing of the stateful source's first samples is still in buffers.
    assert len(range(1000, counted[-1] + 1)) - len(counted) < 4 * 24


def test_a_source_that_stands_at_one_place_must_allow_a_copy(monkeypatch):
    class Open(Counting):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle 'file' object")

    with pytest.raises(ConfigError, match=r"source 'data' must allow a copy.*cannot pickle"):
        trained_in_turns(monkeypatch, [(2, 2), (1, 4)], lambda: {"data": Open(500)})


def test_a_source_that_ends_is_read_again_and_no_sample_is_left_out(ranks):
    samples = [sample(number) for number in range(60)]
    of_ranks = ranks.run(lambda place: taken(loader_of(place, {"data": Finite(samples)}, None, steps=40), 40))
    passes = [[], []]
    for steps in of_ranks[:REPLICAS]:
        begins = [number for number, step in enumerate(steps) if step[0] == 0]
        for seen, (begin, end) in zip(passes, itertools.pairwise(begins), strict=False):
            seen += [number for step in steps[begin:end] for batch in step[4] for number in batch["input_ids"][0]]
    expected = sorted(number for found in samples for number in found["input_ids"].tolist())
    # an empty pack has one token, 0, which no sample has
    assert [sorted(filter(None, seen)) for seen in passes] == [expected, expected]


def test_what_fails_on_one_rank_is_heard_on_all(ranks):
    def broken(rank):
        yield from (sample(number) for number in range(60))
        if rank == 1:
            raise OSError("shard 7 is gone")
        yield from Counting(500)

    def heard(place):
        with pytest.raises(DataError) as caught:
            taken(loader_of(place, {"data": broken(place[0])}, None), STEPS)
        return str(caught.value)

    assert ranks.run(heard) == ["rank 1: source 'data': shard 7 is gone"] * ranks.size


@pytest.mark.filterwarnings("ignore:source 'data', sample")
def test_all_ranks_count_the_samples_over_a_limit_that_the_first_stages_leave_out(ranks):
    long = sample(1) | {name: sample(1)[name].repeat(30) for name in ("input_ids", "labels")}
    long["pixel_values"] = None if long["pixel_values"] is None else long["pixel_values"].repeat(30, 1, 1, 1)
    samples = [long if number % 20 == 0 else sample(number) for number in range(100)]

    def work(place):
        loader = loader_of(place, {"data": Finite(samples)}, None, oversized="drop")
        return [(step.epoch, dict(step.oversized)) for step, _ in itertools.islice(loader, STEPS)]

    first, *others = ranks.run(work)
    assert all(found == first for found in others)
    assert [count for epoch, found in first if epoch == 0 for count in found.values()][-1] == 5
    assert [*first[0][1]] == ["drop"]
