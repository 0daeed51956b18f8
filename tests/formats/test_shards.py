from pathlib import Path

import numpy as np

from omnibal.formats.shards import Shard, Shards


def shards(*sizes):
    """Shards of (items, samples); a range stands for the records."""
    return Shards([Shard(str(number), range(items), Path(), samples) for number, (items, samples) in enumerate(sizes)])


def test_items_repeat_from_the_first_and_some_may_never_be_used():
    found = shards((4, 2), (2, 5), (3, 3))
    samples = np.arange(found.num_samples)
    assert found.item_of(samples).tolist() == [0, 1, 4, 5, 4, 5, 4, 6, 7, 8]
    assert found.source_of(samples).tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert found.used_items().tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert found.num_used_items == 7
    assert found.samples_of(np.array([1, 2, 4, 8])).tolist() == [1, 2, 4, 6, 9]
    assert found.samples_of(np.arange(9)).tolist() == samples.tolist()


def test_items_are_located():
    found = shards((4, 4), (1, 1), (3, 3))
    places = [found.locate(item) for item in range(8)]
    assert [(shard.name, place) for shard, place in places] == [
        *(("0", place) for place in range(4)),
        ("1", 0),
        *(("2", place) for place in range(3)),
    ]
