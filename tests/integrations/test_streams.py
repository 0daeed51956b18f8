"""Sources that are drawn one by one and may never end: what ranks train on, and what they do not wait for."""

import itertools
import os
import pickle
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import IterableDataset
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchStream

from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.buffer import BufferedSample, SampleBuffer, StreamSettings
from omnibal.integrations.loops import balanced_loader, pack_loss
from omnibal.integrations.streams import balanced_stream
from omnibal.integrations.trainer.drawn import Stream
from omnibal.vlm.weights import check_data, load_data
from tests.engine.launch import launch
from tests.families.models import small_config
from tests.integrations.items import Collate, items_of
from tests.vlm.families import plain_backward, plain_family_model

LIMITS = PackLimits(8, 64)


def item(number, *, images=True, tokens=None):
    """A sample that can be told from all others: with images, or a text."""
    chance = np.random.default_rng(number)
    tiles = int(chance.integers(0, 4)) if images and tokens is None else 0
    ids = torch.full((int(chance.integers(4, 16)) + 4 * tiles if tokens is None else tokens,), number)
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(tiles, 1) if tiles else None}


class Counting:
    """Counts up from a number, for ever; can be resumed."""

    def __init__(self, first=0, step=1, **options):
        self.next, self.step, self.options, self.calls = first, step, options, 0

    def __iter__(self):
        while True:
            number, self.next = self.next, self.next + self.step
            self.calls += 1
            yield item(number, **self.options)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def stream_of(sources, **options):
    options = {"buffer": 24, "micro_batches": 2, "weigh_tokens": False, **options}
    return balanced_stream(sources, list, LIMITS, **options)


def numbers(batch):
    """Samples of a batch, its filler aside."""
    return [int(sample["input_ids"][0]) for sample in batch if (sample["labels"] >= 0).any()]


def taken(loader, batches):
    return [numbers(batch) for batch in itertools.islice(loader, batches)]


def several():
    return {
        "stateful": Counting(),
        "list": [item(10_000 + number) for number in range(37)],
        "stateless": map(item, itertools.count(20_000)),
        "hugging_face": IterableDataset.from_generator(
            lambda: ({"number": 30_000 + number} for number in range(50))
        ).map(lambda row: {**item(row["number"]), "number": 0}),
    }


MIXTURE = {"stateful": 2, "list": 1, "stateless": 1, "hugging_face": 1}


def test_a_step_after_a_failure_goes_on_behind_the_last_one():
    class Failing(Counting):
        def __iter__(self):
            for found in super().__iter__():
                if self.calls == 90:
                    raise OSError("the network is gone")
                yield found

    feed, whole = stream_of({"data": Failing()}), stream_of({"data": Counting()})
    steps, failures = [], 0
    while len(steps) < 12 and failures < 3:
        try:
            steps.append([numbers(batch) for batch in feed.step()[1]])
        except DataError:
            failures += 1
    assert failures == 1
    assert steps == [[numbers(batch) for batch in whole.step()[1]] for _ in range(12)]


def test_every_sample_of_a_source_that_ends_is_trained_once_within_the_limits():
    loader = stream_of(iter([item(number) for number in range(100)]))
    batches = list(loader)
    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(100))
    assert len(batches) % 2 == 0
    for batch in batches:
        images = sum(0 if sample["pixel_values"] is None else len(sample["pixel_values"]) for sample in batch)
        assert 0 < images <= LIMITS.vision_units + 1  # a filler has the fewest that there are
        assert sum(len(sample["input_ids"]) for sample in batch if (sample["labels"] >= 0).any()) <= LIMITS.llm_tokens


def test_a_source_that_is_indexed_has_another_order_in_every_iteration():
    loader = stream_of([item(number) for number in range(60)])
    first, second = ([number for batch in loader for number in numbers(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second


@pytest.mark.filterwarnings("ignore:sources without state_dict")
@pytest.mark.parametrize("steps", [0, 1, 9, 20])
def test_a_resumed_run_sees_the_samples_that_would_have_followed(steps):
    whole = taken(stream_of(several(), mixture=MIXTURE), 2 * steps + 30)
    loader = stream_of(several(), mixture=MIXTURE)
    begun = iter(loader)
    for _ in range(2 * steps + (steps > 0)):  # half a step more: it is trained again
        next(begun)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    begun.close()
    sources = several()
    again = stream_of(sources, mixture=MIXTURE)
    again.load_state_dict(state)
    assert taken(again, 30) == whole[2 * steps :]
    if steps == 20:  # no more than about twice what the buffer holds, and what was drawn ahead
        drawn = len([number for batch in whole[2 * steps :] for number in batch if number < 10_000])
        assert sources["stateful"].calls < drawn + 4 * 24


def test_shares_are_those_that_were_asked_for():
    sources = {"a": Counting(), "b": [item(10_000 + number) for number in range(9)], "c": Counting(20_000)}
    batches = taken(stream_of(sources, mixture={"a": 0.5, "b": 0.3, "c": 0.2}), 200)
    drawn = np.array([number for batch in batches for number in batch]) // 10_000
    assert np.bincount(drawn) / len(drawn) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_shares_may_be_of_tokens_and_change():
    mixture = {"shares": {"a": 1, "b": 0}, "by": "llm_tokens", "schedule": [{"step": 100, "shares": {"b": 1}}]}
    loader = stream_of({"a": Counting(), "b": Counting(10_000)}, mixture=mixture)
    rows = [
        [
            sum(len(item(number)["input_ids"]) for number in batch if (number >= 10_000) == is_b)
            for is_b in (False, True)
        ]
        for batch in taken(loader, 300)
    ]
    share = np.array(rows)[:, 1] / np.sum(rows, axis=1)
    # Samples are drawn some steps ahead of their training; two batches are a step.
    assert [share[at : at + 40].mean() for at in (0, 100, 220)] == pytest.approx([0.2, 0.7, 1.0], abs=0.2)


@pytest.mark.parametrize("by", ["samples", "llm_tokens"])
def test_shares_over_any_thousand_steps_are_those_that_were_asked_for(by):
    """Also while they change, though samples are drawn some twenty steps before they are trained."""
    knots = [(400, {"a": 3, "b": 1}), (900, {"a": 1}), (901, {"b": 1})]
    schedule = [{"step": step, "shares": shares} for step, shares in knots]
    mixture = Mixture.of({"shares": {"a": 1, "b": 3}, "by": by, "schedule": schedule})
    loader = stream_of({"a": Counting(), "b": Counting(10**6)}, mixture=mixture, buffer=160, micro_batches=1)
    rows = []
    for _ in itertools.islice(loader, 2000):
        given = loader.last_step.num_samples if by == "samples" else loader.last_step.llm_tokens
        rows.append(
            [given, *(share * given for pair in zip(*loader.step_shares.values(), strict=True) for share in pair)]
        )
    sums = np.cumsum([np.zeros(5), *rows], axis=0)
    total, asked, held = np.split(sums[1000:] - sums[:-1000], [1, 3], axis=1)
    assert (np.abs(held - asked) <= 0.01 * total).all()
    own = np.array(rows)
    assert own[1100:, 4] == pytest.approx(own[1100:, 0])  # all of b at the end


def test_a_buffer_is_bounded_in_samples_and_bytes():
    settings = StreamSettings(limits=LIMITS, micro_batches=1, oversized="drop", buffer=30)

    def draw(found):
        return BufferedSample(found, (1, 3, 2))

    draws = SampleBuffer({"data": Counting()}, draw, settings, rank=0, division=[1])
    draws.fill(0)
    assert len(draws.samples) == 30
    bounded = replace(settings, buffer_bytes=40)
    few = SampleBuffer({"data": Counting()}, lambda _: draw(b"1234"), bounded, rank=0, division=[1])
    few.fill(0)
    few.fill_up(50)
    assert len(few.samples) == 10


class Stuck:
    """Yields some samples, then none until it is released."""

    def __init__(self, count):
        self.count, self.released = count, threading.Event()

    def __iter__(self):
        yield from map(item, range(self.count))
        self.released.wait()
        yield from map(item, range(self.count, 2 * self.count))


def test_a_slow_source_is_named_and_a_dead_one_ends_the_run():
    slow = Stuck(20)
    loader = stream_of({"slow": slow, "fast": Counting(1000)}, mixture={"slow": 1, "fast": 1}, warn_seconds=0.02)
    name = loader.filling._name

    def release(waiting):
        name(waiting)
        if "slow" in str(waiting):  # on a busy machine the other one may be waited for, too
            slow.released.set()

    loader.filling._name = release
    with pytest.warns(UserWarning, match="all ranks wait for source 'slow' of rank 0, idle for 0 s"):
        assert len(taken(loader, 30)) == 30
    dead = Stuck(20)
    with (
        pytest.warns(UserWarning, match="all ranks wait for source 'dead'"),
        pytest.raises(DataError, match="source 'dead' must bring samples, got none for 0 s on rank 0"),
    ):
        taken(stream_of({"dead": dead}, warn_seconds=0.02, wait_seconds=0.05), 100)
    dead.released.set()


def broken():
    yield from map(item, range(40))
    raise OSError("shard 7 is gone")


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([], {}, "source 'data' must yield samples in every pass, got none"),
        (
            {"a": Counting(), "b": iter([])},
            {"mixture": {"a": 1, "b": 1}},
            "source 'b' must yield samples in every pass, got",
        ),
        (broken(), {}, "rank 0: source 'data': shard 7 is gone"),
        (map(int, "12"), {}, "rank 0: source 'data', sample 0: "),
        (
            (item(number, tokens=number % 9) for number in range(1, 40)),
            {},
            "source 'data', sample 8: a sample must have at least 1 token, got 0",
        ),
        (
            Counting(),
            {"measure": lambda found: (0, 4, 5)},
            "sample 0: a sample must have 0 vision units or more, .* got 0, 5 and 4",
        ),
    ],
)
def test_bad_data_is_refused_in_a_line(sources, options, message):
    with pytest.raises(DataError, match=message):
        taken(stream_of(sources, **options), 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mixture": {"ocr": 1, "chatt": 1}},
            r"mixture must name sources of the data, got 'chatt'; did you mean 'chat'\?",
        ),
        ({}, "mixture must say what share each source gets, got none for ocr, chat"),
        ({"mixture": {"ocr": 1, "chat": 1}, "buffer": 0}, "buffer must be at least 1, got 0"),
        ({"mixture": {"ocr": 1, "chat": 1}, "warn_seconds": 0}, "warn_seconds must lie between 0 and 1800, got 0"),
    ],
)
def test_bad_settings_are_refused_in_a_line(options, message):
    with pytest.raises(ConfigError, match=message):
        stream_of({"ocr": Counting(), "chat": Counting()}, **options)


def test_an_endless_source_has_no_epochs():
    with pytest.raises(
        DataError, match=r"dataset must be read by index and have a length, got Counting; .*balanced_stream"
    ):
        balanced_loader(Counting(), list, LIMITS)


def test_a_mixture_by_target_tokens_wants_target_tokens():
    loader = stream_of(
        {"a": Counting(), "b": Counting(5000)},
        measure=lambda found: (0, len(found["input_ids"]), 0),
        mixture={"shares": {"a": 1, "b": 1}, "by": "target_tokens"},
    )
    with pytest.raises(
        DataError, match="source 'a' must have target_tokens in a mixture by them, got none in 1024 samples"
    ):
        taken(loader, 1000)


def test_a_state_of_other_packs_is_refused():
    state = stream_of(Counting()).state_dict()
    with pytest.raises(
        ConfigError, match="buffer must be that of the state of the streams, 24, got 25; every rank goes on in its"
    ):
        stream_of(Counting(), buffer=25).load_state_dict(state)


def becoming_short(count=2000, step=1):
    """Samples that fill half a pack at first, then a sixteenth of one."""
    return (item(number, tokens=32 if number < count // 4 else 4) for number in range(1, count, step))


def tokens_of(batch):
    return sum(len(sample["input_ids"]) for sample in batch if (sample["labels"] >= 0).any())


@pytest.mark.parametrize("buffer_bytes", [None, 2000])
def test_samples_that_become_short_end_no_run(buffer_bytes):
    """A buffer grows until it fills a step; where its bytes do not allow that, packs get emptier."""
    batches = list(stream_of(becoming_short(), buffer=24, buffer_bytes=buffer_bytes, micro_batches=4))
    assert sorted(number for batch in batches for number in numbers(batch)) == [*range(1, 2000)]
    assert len(batches) % 4 == 0
    short = [tokens_of(batch) for batch in batches[-80:-20]]
    assert min(short) > (0.9 * 64 if buffer_bytes is None else 0)
    assert buffer_bytes is None or max(short) < 0.8 * 64


def test_a_resumed_run_whose_buffer_has_grown_sees_the_samples_that_would_have_followed():
    def loader():
        return stream_of(Numbered(lambda number: item(number, tokens=32 if number < 500 else 4)), micro_batches=4)

    whole, begun, again = taken(loader(), 400), loader(), loader()
    first = taken(begun, 320)
    again.load_state_dict(begun.state_dict())
    assert first + taken(again, 80) == whole


class Numbered(Counting):
    """Samples by their numbers, to an end if there is one."""

    def __init__(self, make, end=10**6):
        super().__init__(1)
        self.make, self.end = make, end

    def __iter__(self):
        while self.next < self.end:
            number, self.next = self.next, self.next + 1
            yield self.make(number)


def long_ones(number):
    return item(number, tokens=64 * 39 if number % 50 == 0 else 10)


def test_samples_over_a_limit_are_left_out_named_and_counted():
    loader = stream_of(Numbered(long_ones, 1000), oversized="drop")
    with pytest.warns(UserWarning, match="must be within the limits") as told:
        seen = [number for batch in loader for number in numbers(batch)]
    assert sorted(seen) == [number for number in range(1, 1000) if number % 50]
    assert loader.oversized == 19
    assert next(str(warning.message) for warning in told) == (
        "source 'data', sample 49 must be within the limits of 8 vision units and 64 LLM tokens, got 0 and 2496; it is "
        "left out, as all such ones (1 so far)"
    )
    assert len(told) == 2  # and the tenth
    with pytest.warns(UserWarning, match="it gets a pack of its own"):
        batches = list(stream_of(Numbered(long_ones, 1000)))
    assert sorted(number for batch in batches for number in numbers(batch)) == [*range(1, 1000)]
    assert all(len(batch) == 1 for batch in batches if tokens_of(batch) > 64)


@pytest.mark.filterwarnings("ignore:source 'data', sample")
def test_samples_that_were_left_out_are_counted_once_by_a_resumed_run():
    begun, again, whole = (stream_of(Numbered(long_ones, 1000), oversized="drop") for _ in range(3))
    first = taken(begun, 80)
    again.load_state_dict(begun.state_dict())
    assert 0 < again.oversized <= begun.oversized < 19
    assert first + taken(again, 1000) == taken(whole, 1000)
    assert again.oversized == 19


@pytest.mark.parametrize(
    ("options", "sources", "message"),
    [
        (
            {"oversized": "error"},
            Numbered(long_ones),
            "rank 0: source 'data', sample 49 must be within .*; oversized 'alone' gives",
        ),
        (
            {"oversized": "drop"},
            [item(number, tokens=65) for number in range(9)],
            "limits must allow a sample of the sources, got none; sou",
        ),
        (
            {"mixture": {"a": 1, "b": 1}, "oversized": "drop"},
            {"a": Counting(), "b": Numbered(lambda number: item(number, tokens=65))},
            "source 'b', sample 1023 must be within .*, as none of the first 1024 of this source is; raise the limits",
        ),
    ],
)
def test_samples_over_a_limit_are_refused_where_nothing_else_can_be_trained(options, sources, message):
    with pytest.raises(DataError, match=message):
        taken(stream_of(sources, **options), 1000)


def test_oversized_is_one_of_three():
    with pytest.raises(ConfigError, match=r"oversized must be one of \('alone', 'error', 'drop'\), got 'cut'"):
        stream_of(Counting(), oversized="cut")


def going_on(before, after, batches=80, **options):
    """What follows in other sources than those that a state is of."""
    begun = stream_of(before, **options)
    taken(begun, batches)
    again = stream_of(after, **options)
    again.load_state_dict(begun.state_dict())
    return taken(again, 40)


def shifted(by):
    return lambda number: item(number + by, tokens=4 + number % 9)


@pytest.mark.filterwarnings("ignore:sources without state_dict")
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            Numbered(shifted(0)),
            Numbered(shifted(5000)),
            "source 'data' must bring the samples again that the state was",
        ),
        (Numbered(shifted(0)), Numbered(shifted(0), 100), "source 'data' must bring the samples again .* got its end"),
        (
            map(shifted(0), range(1000)),
            map(shifted(0), range(100)),
            "source 'data': the .* samples that were drawn before must come again, got 100",
        ),
        (
            [item(number) for number in range(900)],
            [item(number) for number in range(899)],
            "source 'data': the dataset must have the 900 samples that its order was made for, got 899; under another",
        ),
    ],
)
def test_a_state_of_another_stream_is_refused(before, after, message):
    with pytest.raises(DataError, match=message):
        going_on(before, after)


def test_samples_that_change_at_random_are_told_and_go_on():
    chance = np.random.default_rng(0)

    def some_change(number):
        return item(number, tokens=10 + int(chance.integers(0, 2)))

    with pytest.warns(
        UserWarning, match="source 'data' must bring the samples again .*, got .* others of .*, as where"
    ):
        assert len(going_on(Numbered(some_change), Numbered(some_change))) == 40


def test_sources_go_on_by_name_where_one_is_added_and_one_is_gone():
    def some(names):
        numbers_from = {"a": 1, "b": 10_000, "c": 20_000}
        return {name: Counting(numbers_from[name]) for name in names}

    begun, others = stream_of(some("ab"), mixture={"a": 1, "b": 1}), {"mixture": {"c": 1, "a": 3}}
    before = {number for batch in taken(begun, 60) for number in batch}
    again = stream_of(some("ca"), **others)
    with pytest.warns(UserWarning) as told:
        again.load_state_dict(begun.state_dict())
    assert [str(warning.message) for warning in told] == [
        "source 'c' is new and begins at its start",
        "source 'b' is gone; what was drawn of it is left out",
    ]
    after = [number for batch in taken(again, 120) for number in batch]
    assert len(after) == len(set(after)) == len(set(after) - before)
    of_a = sorted(number for number in {*before, *after} if number < 10_000)
    assert len(of_a) > of_a[-1] - 30  # none is left out: the others are in the buffer
    assert min(number for number in after if number >= 10_000) == 20_000
    assert np.mean([number < 10_000 for number in after[-100:]]) == pytest.approx(0.75, abs=0.1)
    # And once more from there.
    last = stream_of(some("ca"), **others)
    last.load_state_dict(again.state_dict())
    assert taken(last, 40) == taken(again, 40)


def early(number):
    """Images and videos in the beginning alone."""
    found = item(number, images=number < 20)
    if number in (3, 9):
        found["pixel_values_videos"] = torch.zeros(3, 1)
    return found


def shown(batch):
    """Samples of a batch, its fillers among them, and whether each shows images and videos."""
    pixels = [[sample.get(name) is not None for name in ("pixel_values", "pixel_values_videos")] for sample in batch]
    return [(int(sample["input_ids"][0]), *of) for sample, of in zip(batch, pixels, strict=True)]


def test_a_kind_once_drawn_is_in_all_packs_and_a_run_that_goes_on_has_the_same_fillers(tmp_path):
    def loader():
        return stream_of(Numbered(early))

    whole, begun, again = [shown(batch) for batch in itertools.islice(loader(), 80)], loader(), loader()
    assert all(all(map(any, list(zip(*batch, strict=True))[1:])) for batch in whole)
    taken(begun, 60)
    state = begun.state_dict()
    assert sorted(state["position"]["fillers"]) == [1, 3]
    assert state["position"]["kinds"] == 3
    torch.save(state, tmp_path / "state.pt")
    check_data(tmp_path / "state.pt")
    again.load_state_dict(load_data(tmp_path / "state.pt"))
    assert [shown(batch) for batch in itertools.islice(again, 20)] == whole[60:]


def test_a_state_of_another_version_is_refused():
    state = {name: value for name, value in stream_of(Counting()).state_dict().items() if name != "version"}
    with pytest.raises(ConfigError, match="must be of version 'streams 2', got None; finish the run with the version"):
        stream_of(Counting()).load_state_dict(state)


def test_another_mixture_is_told_and_holds():
    begun = stream_of({"a": Counting(), "b": Counting(10_000)}, mixture={"a": 1, "b": 1})
    taken(begun, 60)
    again = stream_of({"a": Counting(), "b": Counting(10_000)}, mixture={"a": 1, "b": 0})
    with pytest.warns(UserWarning, match="mixture is another one from here on"):
        again.load_state_dict(begun.state_dict())
    assert all(number < 10_000 for batch in taken(again, 100)[-40:] for number in batch)


class Undivided(TorchStream):
    """Yields some samples, in each worker; fails at one of them if asked to."""

    def __init__(self, count, fails_at=None, divides=False):
        super().__init__()
        self.count, self.fails_at, self.divides = count, fails_at, divides

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if self.divides else (0, 1)
        for number in range(first, self.count, step):
            if number == self.fails_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item(number)


def test_workers_that_read_the_same_are_noticed():
    undivided, few, divided = Undivided(100), Undivided(3), Undivided(100, divides=True)
    for dataset in (undivided, few):
        with pytest.raises(
            DataError, match="samples must be divided over 2 worker processes, got each one 2 times; let"
        ):
            list(stream_of(DataLoader(dataset, batch_size=None, num_workers=2)))
    loader = stream_of(DataLoader(divided, batch_size=None, num_workers=2))
    assert sorted(number for batch in loader for number in numbers(batch)) == [*range(100)]


@pytest.mark.parametrize("size", [None, 4])
def test_workers_that_read_the_same_are_noticed_in_a_trainers_stream(size):
    with pytest.raises(DataError, match="samples must be divided over 2 worker processes, got each one 2 times; let"):
        list(Stream(Undivided(100), size, 0, 2, {"num_workers": 2}))
    read = list(Stream(Undivided(100, divides=True), size, 0, 1, {"num_workers": 2}))
    samples = read if size is None else [sample for batch in read for sample in batch]
    assert sorted(numbers(samples)) == [*range(100)]


# On two ranks


def losses():
    """Of a step of a small model: each rank's packs' sum, its mean over ranks as hosts take it, and its samples."""
    items, rank = items_of("internvl"), dist.get_rank()
    model = plain_family_model(small_config("internvl"))
    own = [items[number] for number in range(rank, len(items), 2)]
    loader = balanced_stream(
        iter(own), Collate("internvl"), PackLimits(9, 90), model=model, buffer=40, micro_batches=6, oversized="alone"
    )
    batches = list(loader)  # one step
    loss = torch.stack([pack_loss(model, batch).detach() for batch in batches]).sum()
    dist.all_reduce(loss)
    return len(batches), float(loss) / 2, model.state_dict()


def even():
    """Vision units and tokens of all ranks' packs in 60 steps, as each rank was told, and its own samples."""
    loader = stream_of(Counting(dist.get_rank(), 2), buffer=96)
    loads, own = [], []
    for number, batch in enumerate(itertools.islice(loader, 120)):
        own += numbers(batch)
        if number % 2:
            loads.append(np.stack([loader.last_step.load.vision_units, loader.last_step.load.llm_tokens], axis=-1))
    return np.stack(loads), own


def ends():
    """Rank 1's source ends long before rank 0's: how many batches each rank ran, and its own samples."""
    count = (90, 12)[dist.get_rank()]
    batches = [*stream_of(iter([item(2 * number + dist.get_rank()) for number in range(count)]))]
    return len(batches), sorted(number for batch in batches for number in numbers(batch))


def refused(sources, **options):
    """What each rank says."""
    try:
        taken(stream_of(sources(dist.get_rank()), **options), 1000)
    except DataError as error:
        return str(error)
    return None


def resumed():
    rank = dist.get_rank()

    def loader():
        indexed = [item(10_000 + number) for number in range(40)]
        return stream_of({"a": Counting(rank, 2), "b": indexed}, mixture={"a": 1, "b": 1})

    begun, again = loader(), loader()
    first = taken(begun, 24)
    again.load_state_dict(begun.state_dict())
    return first + taken(again, 14) == taken(loader(), 38)


def shortened():
    """Rank 1's samples become short: how many batches each rank ran, and its own samples."""
    rank = dist.get_rank()
    source = becoming_short() if rank else iter([item(number, tokens=32) for number in range(2000, 2400)])
    batches = [*stream_of(source, micro_batches=4)]
    return len(batches), sorted(number for batch in batches for number in numbers(batch))


def work():
    dead, warned = Stuck(20), {"warn_seconds": 0.05, "wait_seconds": 0.2}
    told = [
        refused(lambda rank: broken() if rank else Counting(1000)),
        refused(lambda rank: {"dead": dead} if rank else {"dead": Counting(1000)}, **warned),
        refused(lambda rank: Counting()),
        refused(lambda rank: Counting(1000 * rank, images=rank == 0)),
    ]
    dead.released.set()
    return losses(), even(), ends(), told, resumed(), shortened()


@pytest.mark.distributed
def test_two_ranks_that_draw_for_themselves():
    results = launch(2, "tests.integrations.test_streams:work")
    losses_, even_, ends_, told, resumed_, shortened_ = zip(*results, strict=True)
    # The loss is that of all samples, one by one.
    plain = plain_family_model(small_config("internvl"))
    plain.load_state_dict(losses_[0][2])
    assert losses_[0][0] == losses_[1][0] == 6
    assert losses_[0][1] == pytest.approx(float(plain_backward(plain, items_of("internvl"))[0]), rel=1e-5)
    # Ranks are even, and each trains on what it drew.
    loads = even_[0][0]
    assert (loads == even_[1][0]).all()
    assert (loads.max(axis=1).mean(axis=(0, 1)) / loads.mean(axis=(0, 1, 2)) < 1.05).all()
    assert {number % 2 for number in even_[0][1]} == {0}
    assert {number % 2 for number in even_[1][1]} == {1}
    # They end together, and no sample is lost.
    assert ends_[0][0] == ends_[1][0]
    assert ends_[0][1] == list(range(0, 180, 2))
    assert ends_[1][1] == list(range(1, 24, 2))
    # What is wrong on one rank ends all, with its name.
    assert told[0] == told[1]
    assert told[0][0] == "rank 1: source 'data': shard 7 is gone"
    assert told[0][1].startswith("source 'dead' must bring samples, got none for 0 s on rank 1")
    assert told[0][2].startswith("ranks must draw samples of their own, got the same first ones on ranks 0 and 1")
    assert told[0][3].startswith("rank 1: a rank must have drawn an image where others have, got none")
    assert resumed_ == (True, True)
    assert shortened_[0][0] == shortened_[1][0]
    assert [numbers for _, numbers in shortened_] == [[*range(2000, 2400)], [*range(1, 2000)]]
