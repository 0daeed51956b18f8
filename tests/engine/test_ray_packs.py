"""What a Ray cluster reads is what local workers read, in the same order, whatever happens to its readers."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import pytest

from omnibal.engine.reading import PackReader, RayPacks, left_out_of
from omnibal.engine.samples import CheckedSamples, SampleRules
from omnibal.errors import ConfigError, DataError
from omnibal.vlm import load_model
from tests.engine.cases import SmallDataset
from tests.engine.small import PIXEL_SHAPE, small_config
from tests.engine.test_reading_ahead import is_same, loader_of, steps_of
from tests.engine.troubled import TroubledDataset

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.distributed


def troubled(**troubles):
    return TroubledDataset(SmallDataset(copies=2), **troubles)


@pytest.fixture(scope="module")
def cluster():
    """Runs a function in a process that has started a Ray cluster.

    Ray ends that process when it has not reached its own server for a minute, which happens on a busy machine.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_cluster) as process:
        yield lambda function, *given: process.submit(function, *given).result()
        process.submit(ray.shutdown).result()


def _start_cluster():
    # Readers have a niceness of 15 by default: beside other work on all cores they would take minutes.
    patient = {"gcs_rpc_server_reconnect_timeout_s": 600, "health_check_failure_threshold": 200, "worker_niceness": 0}
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, _system_config=patient, **quiet)


def test_a_reader_that_is_killed_loses_nothing_and_a_resumed_run_goes_on(cluster, tmp_path):
    cluster(_lose_a_reader, tmp_path / "killed")
    assert (tmp_path / "killed").exists(), "a reader was killed on the way"


def test_a_sample_that_cannot_be_read_is_left_out_of_its_pack(cluster):
    cluster(_leave_out)


def _leave_out():
    dataset, reader = troubled(broken=5), PackReader(view="images", pixel_shape=PIXEL_SHAPE)
    rules = SampleRules.of(load_model(small_config()))
    checked = CheckedSamples(dataset, dataset.lengths(), rules, "skip")
    packs = RayPacks(checked, [[4, 5], [6]], reader.collate, address="auto", count=2, pin=False)
    first, second = islice(packs, 2)
    assert left_out_of(first) == {5: "image must be decodable, got picture.png (sample 5)"}
    assert left_out_of(second) == {}
    assert first["input_ids"][0].tolist() == dataset[4]["input_ids"].tolist()


def _lose_a_reader(once):
    dataset = troubled(once=once)
    local, remote = loader_of(SmallDataset(copies=2), workers=0), loader_of(dataset, ray="auto")
    steps = local.steps_per_epoch + 2  # into the second epoch
    expected = steps_of(local, steps)
    assert is_same(steps_of(remote, 2), expected[:2])
    again = loader_of(dataset, ray="auto")
    again.load_state_dict(remote.state_dict())
    assert is_same(steps_of(again, steps - 2), expected[2:])


def test_what_cannot_be_read_is_named(cluster):
    with pytest.raises(DataError, match=r"^image must be decodable, got picture.png \(sample 5\)$"):
        cluster(_read, troubled(broken=5))


@pytest.mark.slow  # four readers start one after another
def test_a_pack_that_no_reader_survives_is_named(cluster):
    with pytest.raises(
        DataError, match=r"samples \[.*\b5\b.*\] must be readable by Ray, whose readers died four times"
    ):
        cluster(_read, troubled(deadly=5))


def _read(dataset):
    steps_of(loader_of(dataset, ray="auto"), 8)


def test_only_so_many_packs_are_read_before_they_are_wanted(cluster):
    # Four were taken; the thread has made three more, and asked for three behind these.
    assert cluster(_asked_for) <= 4 + 3 + 3 + 1


def _asked_for():
    asked = []
    packs = (asked.append(number) or [number] for number in range(100))
    batches = iter(RayPacks([{}] * 100, packs, lambda samples: {}, address="auto", count=3, pin=False))
    for _ in range(4):
        next(batches)
    batches.close()
    return len(asked)


def test_no_cluster_at_the_address(cluster):
    with pytest.raises(
        ConfigError, match=r"omnibal\.data\.ray must be the address of a Ray cluster that runs, got 'auto'"
    ):
        cluster(_read_without_cluster)


def _read_without_cluster():
    ray.shutdown()
    os.environ |= {"RAY_gcs_rpc_server_connect_timeout_s": "1"}
    loader_of(SmallDataset(), ray="auto")
