"""Encoder and LLM with replicas of their own: what they read, resume, refuse, and have in common with a pipeline."""

import re
from dataclasses import replace

import pytest
import torch

from omnibal.cluster import Encoder
from omnibal.engine.resolve import check_run
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from tests.engine.cases import changed, run_of, settings
from tests.engine.launch import how_all_end, launch
from tests.engine.small import Case, save_small_model

pytestmark = pytest.mark.distributed

# The same packs for one replica of the LLM and for two, with one without an image.
ONE, TWO = [[[0, 1], [2], [4, 7], [3, 5, 6]]], [[[0, 1], [4, 7]], [[2], [3, 5, 6]]]
MIXED = ("full", "none", "selective")
BFLOAT16 = {"bf16": {"enabled": True}}


def units(boundaries, packs, encoder_replicas, encoder_stages=1, **more):
    more = {"schedule": "zero-bubble", "recompute": MIXED} | more
    return Case(boundaries, packs, encoder=Encoder(encoder_stages, encoder_replicas), **more)


ADAM = {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.01, "eps": 1e-3}
STEPS, CLIPPING = 3, 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder, tied=False)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    save_small_model(folder, tied=True)
    return folder


@pytest.mark.cluster(2)
@pytest.mark.parametrize("num_processes", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_resumed_run_has_every_bit_of_one_that_went_on(num_processes, model, tmp_path):
    optimizer = {"type": "AdamW", "params": ADAM | {"torch_adam": True}}
    shapes = {3: [((0, 5, 10), TWO, 1), ((0, 5, 10), ONE, 2)], 5: [((0, 5, 7, 10), TWO, 1)]}[num_processes]
    cases = [
        units(*shape, model=str(model), zero_stage=zero_stage, steps=STEPS,
              extra={"optimizer": optimizer, "gradient_clipping": zero_stage * CLIPPING})
        for shape in shapes
        for zero_stage in (0, 1)
    ]  # fmt: skip
    for results in launch(num_processes, "tests.engine.cases:steps_with_a_resume", cases, str(tmp_path)):
        for whole, resumed in results:
            assert resumed["losses"] == whole["losses"][-1:]
            assert resumed["norms"] == whole["norms"][-1:]
            assert all(torch.equal(weight, whole["weights"][name]) for name, weight in resumed["weights"].items())
            assert resumed["weights"].keys() == whole["weights"].keys() != set()


@pytest.mark.cluster(2)
@pytest.mark.parametrize(
    ("killed", "named"),
    [
        (0, "rank 0, which keeps the store by which the ranks met, has ended"),
        (2, "ranks 0 and 1 were there last, rank 2 does not answer"),
    ],
)
def test_all_end_when_one_is_killed_and_name_it(killed, named, model, tmp_path):
    case = units((0, 5, 10), TWO, 1, model=str(model), zero_stage=1)
    logs = how_all_end(3, "tests.engine.cases:steps_until_killed", case, killed, tmp_path, timeout_seconds=60)
    assert len(list(tmp_path.iterdir())) == 3
    for rank in {*range(3)} - {killed}:
        (line,) = (line for line in logs[rank].splitlines() if line.startswith("omnibal: rank ") and named in line)
        assert "all ranks must take part, got " in line


def test_each_rank_of_a_dataset_reads_the_packs_of_its_own_replica(model):
    config = settings(model, num_stages=2)
    pipeline = launch(4, "tests.engine.cases:train_units", changed(config, "pipeline", partition=[0, 5, 10]), STEPS)
    apart = launch(3, "tests.engine.cases:train_units", changed(config, "pipeline", encoder={"num_replicas": 1}), STEPS)
    assert [result["losses"] for result in apart] == [pytest.approx(pipeline[0]["losses"], rel=1e-5)] * 3
    assert apart[0]["decoded"] == pipeline[0]["decoded"] + pipeline[1]["decoded"]  # the encoder's replica reads both
    assert apart[0]["evaluation"].samples == 8 and len({result["evaluation"] for result in apart}) == 1
    assert apart[0]["evaluation"].loss == pytest.approx(pipeline[0]["evaluation"].loss, rel=1e-4)
    weights = pipeline[0]["weights"] | pipeline[2]["weights"]
    for result in apart:
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)


def test_equal_replicas_give_every_bit_of_the_pipeline(model):
    case = Case((0, 5, 10), TWO, str(model), MIXED, zero_stage=1, steps=STEPS, schedule="zero-bubble")
    both = [case, replace(case, encoder=Encoder(1, 2))]
    for pipeline, apart in launch(4, "tests.engine.cases:several_steps", both):
        assert apart["losses"] == pipeline["losses"]
        assert apart["norms"] == pipeline["norms"]
        assert apart["weights"].keys() == pipeline["weights"].keys()
        assert all(torch.equal(weight, pipeline["weights"][name]) for name, weight in apart["weights"].items())


REFUSED = {
    "must divide each other, got 2 and 3": units((0, 5, 10), [*TWO, TWO[0]], 2),
    "must divide the 1 packs of a step (micro-batches 1, replicas of the language model 1), got 2": units(
        (0, 5, 10), [[[0, 1]]], 2
    ),
    "num_tensor must be 1": replace(units((0, 5, 10), ONE, 2), encoder=Encoder(1, 2, num_tensor=2)),
    "zero_optimization.stage must be 0 or 1": units((0, 5, 10), ONE, 2, zero_stage=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_units_cannot_run_is_refused(message, model):
    case = replace(REFUSED[message], model=str(model))
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved, plan = run_of(case, num_replicas=len(case.packs))
        check_run(resolved, plan.partition)


def test_a_head_that_is_tied_across_stages_is_refused(tied):
    resolved, plan = run_of(units((0, 5, 7, 10), TWO, 1, model=str(tied)), num_replicas=2)
    with pytest.raises(ConfigError, match=r"must be on one stage where the encoder has replicas .*, got stages 1, 2"):
        check_run(resolved, plan.partition)
    check_run(resolved, Partition((0, 2, 5, 10)))


def test_what_a_ds_config_cannot_ask_is_refused_before_samples_are_measured(model):
    good = changed(settings(model, num_stages=2), "pipeline", encoder={"num_replicas": 1})
    one_micro_batch = good | {"gradient_accumulation_steps": 1}
    cases = [
        (changed(good, "pipeline", num_stages=4), "num_stages without the encoder's 1 must divide the 2 processes that "
         "omnibal.pipeline.encoder (1 stage × 1 replica) leaves of 3, got 3"),
        (changed(good, "pipeline", num_stages=1), "num_stages must count the encoder's 1 and at least one behind"),
        (changed(good, "pipeline", encoder={"num_replicas": 3}), "must leave processes to the language model, got 1 "
         "stage × 3 replicas of 3"),
        (changed(one_micro_batch, "pipeline", encoder={"num_replicas": 2}), "must divide the 1 packs of a step"),
        (good | {"train_batch_size": 3}, "train_batch_size must be 4 (2 micro-batches of one pack, 2 replicas), got 3"),
        (changed(good, "pipeline", encoder={"num_replicas": 1, "placement": "spread"}),
         "omnibal.pipeline.encoder.placement must be a known key"),
        (changed(good, "pipeline", encoder={"num_replicas": 1, "num_stages": 6}, num_stages="auto"),
         "omnibal.pipeline.encoder must leave processes to the language model, got 6 stages × 1 replica of 3"),
    ]  # fmt: skip
    by_rank = launch(3, "tests.engine.cases:early_refusals", [config for config, _ in cases])
    for heard in by_rank:
        for said, (_, message) in zip(heard, cases, strict=True):
            assert message in str(said)
