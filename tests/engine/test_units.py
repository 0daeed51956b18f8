"""Encoder and LLM with replicas of their own compute what plain transformers computes."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from omnibal.cluster import Encoder
from omnibal.engine.grid import check_unit_run
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.vlm import load_model
from tests.engine import test_families as families
from tests.engine.cases import changed, run_of, settings
from tests.engine.launch import all_end, launch
from tests.engine.small import Case, names_of, plain_gradients, plain_training, save_small_model, small_samples
from tests.families.models import small_config
from tests.vlm.families import family_samples, plain_family_model, plain_steps

pytestmark = pytest.mark.distributed

# The same packs for one replica of the LLM and for two; with packs that are empty, and with one without an image.
ONE, TWO = [[[0, 1], [2], [4, 7], [3, 5, 6]]], [[[0, 1], [4, 7]], [[2], [3, 5, 6]]]
EMPTY_ONE, EMPTY_TWO = [[*ONE[0], [], []]], [[*packs, []] for packs in TWO]
MIXED = ("full", "none", "selective")
BFLOAT16 = {"bf16": {"enabled": True}}
EXACT, ROUNDED = {"rtol": 2e-4, "atol": 2e-6}, {"rtol": 0.1, "atol": 0.01}
LANGUAGE = ("text_embedding", "decoder_block", "final_norm", "head")


def units(boundaries, packs, encoder_replicas, encoder_stages=1, **more):
    more = {"schedule": "zero-bubble", "recompute": MIXED} | more
    return Case(boundaries, packs, encoder=Encoder(encoder_stages, encoder_replicas), **more)


CASES = {
    3: {
        "1 for 2": (units((0, 5, 10), EMPTY_TWO, 1), EXACT),
        "1 for 2, ZeRO 1": (units((0, 5, 10), TWO, 1, zero_stage=1), EXACT),
        "1 for 2, 1F1B": (units((0, 5, 10), TWO, 1, zero_stage=1, schedule="1f1b"), EXACT),
        "1 for 2, bf16": (units((0, 5, 10), TWO, 1, zero_stage=1, extra=BFLOAT16), ROUNDED),
        "1 for 2, tied within a stage": (units((0, 5, 10), TWO, 1, zero_stage=1, model="tied"), EXACT),
        "1 for 2, frozen encoder": (units((0, 4, 10), TWO, 1, frozen=("vision",)), EXACT),
        "1 for 2, frozen LLM": (units((0, 4, 10), TWO, 1, zero_stage=1, frozen=LANGUAGE), EXACT),
        "2 for 1": (units((0, 5, 10), EMPTY_ONE, 2), EXACT),
        "2 for 1, ZeRO 1": (units((0, 5, 10), ONE, 2, zero_stage=1), EXACT),
        "2 for 1, frozen encoder": (units((0, 4, 10), ONE, 2, zero_stage=1, frozen=("vision",)), EXACT),
        "2 for 1, within the encoder": (units((0, 3, 10), ONE, 2, schedule="zero-bubble-lean"), EXACT),
    },
    4: {
        "3 for 1": (units((0, 5, 10), EMPTY_ONE, 3), EXACT),
        "3 for 1, ZeRO 1": (units((0, 4, 10), EMPTY_ONE, 3, zero_stage=1, schedule="1f1b"), EXACT),
    },
    5: {
        "1 for 2 of two stages": (units((0, 5, 7, 10), EMPTY_TWO, 1), EXACT),
        "1 for 2 of two stages, ZeRO 1": (units((0, 5, 7, 10), TWO, 1, zero_stage=1), EXACT),
        "1 for 2 of two stages, 1F1B": (units((0, 5, 7, 10), TWO, 1, zero_stage=1, schedule="1f1b"), EXACT),
        "1 of three stages for 2": (units((0, 2, 4, 5, 10), TWO, 1, 3), EXACT),
    },
}
DEEP = {
    3: [Case((0, 4, 6, 10), ONE), units((0, 5, 10), TWO, 1), units((0, 5, 10), ONE, 2, schedule="1f1b")],
    4: [],
    5: [],
}
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


@pytest.mark.parametrize("num_processes", [*CASES])
def test_one_step_equals_plain_transformers(num_processes, model, tied):
    plain = {str(folder): plain_gradients(folder, small_samples()) for folder in (model, tied)}
    cases = {
        name: (replace(case, model=str(tied if case.model else model)), near)
        for name, (case, near) in CASES[num_processes].items()
    }
    # A feature of the ViT that a decoder block reads crosses the border, too: three stages of one replica tell how.
    deep = [replace(case, model=str(model), deep=True) for case in DEEP[num_processes]]
    launched = launch(num_processes, "tests.engine.cases:one_step", [*(case for case, _ in cases.values()), *deep])
    by_rank, of_deep = [result[: len(cases)] for result in launched], [result[len(cases) :] for result in launched]
    check_deep(list(zip(*of_deep, strict=True)))
    for number, (name, (case, near)) in enumerate(cases.items()):
        results, (loss, gradients) = [result[number] for result in by_rank], plain[case.model]
        assert {result["samples"] for result in results} == {8}
        assert [result["loss"] for result in results] == pytest.approx([loss] * num_processes, rel=near["rtol"] / 20)
        assert [result["evaluated"] for result in results] == pytest.approx(
            [loss] * num_processes, rel=near["rtol"] / 20
        )
        trained = gradients.keys() - names_of(case.model, case.frozen)
        assert set().union(*(result["gradients"] for result in results)) == trained, name
        for result in results:
            for weight, gradient in result["gradients"].items():
                torch.testing.assert_close(gradient, gradients[weight], **near, msg=f"{weight} differs in {name}")


def check_deep(cases):
    """Of each case the results of all ranks: gradients are those of the first case, wherever the feature crosses."""
    by_case = [{name: found for result in results for name, found in result["gradients"].items()} for results in cases]
    for results, gradients in zip(cases, by_case, strict=True):
        assert [result["loss"] for result in results] == pytest.approx([cases[0][0]["loss"]] * 3, rel=1e-5)
        assert gradients.keys() == by_case[0].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, by_case[0][name], **EXACT, msg=name)


@pytest.mark.parametrize("num_processes", [3, 5])
def test_training_equals_plain_transformers(num_processes, model):
    optimizer = {"type": "AdamW", "params": ADAM | {"torch_adam": True}}
    plain = {
        clipping: plain_training(
            model, small_samples(), make_optimizer=partial(torch.optim.AdamW, **ADAM), clipping=clipping or 1e9,
            make_scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1), steps=STEPS,
        )
        for clipping in (0.0, CLIPPING)
    }  # fmt: skip
    assert min(plain[CLIPPING][1]) > 2 * CLIPPING  # every step is clipped
    shapes = {3: [((0, 5, 10), TWO, 1), ((0, 5, 10), ONE, 2)], 5: [((0, 5, 7, 10), TWO, 1)]}[num_processes]
    cases = [
        units(*shape, model=str(model), zero_stage=zero_stage, steps=STEPS,
              extra={"optimizer": optimizer, "gradient_clipping": clipping})
        for shape in shapes
        for zero_stage, clipping in ((0, 0.0), (1, CLIPPING))
    ]  # fmt: skip
    for results in launch(num_processes, "tests.engine.cases:several_steps", cases):
        for case, result in zip(cases, results, strict=True):
            losses, norms, weights = plain[case.extra["gradient_clipping"]]
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
            assert result["norms"] == (pytest.approx(norms, rel=1e-3) if case.zero_stage else [None] * STEPS)
            assert result["weights"]
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)


def test_deep_stack_features_of_qwen3_vl_cross_the_border(tmp_path):
    plain_family_model(small_config("qwen3_vl")).save_pretrained(tmp_path)
    kinds = [record.kind for record in load_model(tmp_path).records]
    cut, (of_one,) = kinds.index("projector") + 1, families.PACKS
    cases = [
        units((0, cut, len(kinds)), packs, replicas, model=str(tmp_path), zero_stage=1, steps=STEPS,
              extra=families.SETTINGS)
        for packs, replicas in (([of_one], 2), ([of_one[::2], of_one[1::2]], 1))
    ]  # fmt: skip
    losses, norms, weights = plain_steps(
        tmp_path, [family_samples("qwen3_vl")] * STEPS, clipping=families.CLIPPING, **families.ADAM
    )
    for results in launch(3, "tests.engine.cases:several_steps", cases):
        for case, result in zip(cases, results, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-4), case
            assert result["norms"] == pytest.approx(norms, rel=1e-3), case
            assert result["weights"]
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=f"{name} in {case}")


@pytest.mark.parametrize("num_processes", [3, 5])
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


@pytest.mark.parametrize("killed", [0, 2])
def test_all_end_when_one_is_killed(killed, model, tmp_path):
    case = units((0, 5, 10), TWO, 1, model=str(model), zero_stage=1)
    assert all_end(3, "tests.engine.cases:steps_until_killed", case, killed, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


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
    "prescale_gradients and gradient_predivide_factor": units((0, 5, 10), ONE, 2, extra={"prescale_gradients": True}),
    "zero_optimization.stage must be 0 or 1": units((0, 5, 10), ONE, 2, zero_stage=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_units_cannot_run_is_refused(message, model):
    case = replace(REFUSED[message], model=str(model))
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved, plan = run_of(case, num_replicas=len(case.packs))
        check_unit_run(resolved, plan.partition)


def test_a_head_that_is_tied_across_stages_is_refused(tied):
    resolved, plan = run_of(units((0, 5, 7, 10), TWO, 1, model=str(tied)), num_replicas=2)
    with pytest.raises(ConfigError, match=r"must be on one stage where the encoder has replicas .*, got stages 1, 2"):
        check_unit_run(resolved, plan.partition)
    check_unit_run(resolved, Partition((0, 2, 5, 10)))


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
        (good | {"prescale_gradients": True}, "prescale_gradients and gradient_predivide_factor must be left out"),
        (changed(good, "pipeline", encoder={"num_replicas": 1, "placement": "spread"}),
         "omnibal.pipeline.encoder.placement must be a known key"),
        (changed(good, "pipeline", encoder={"num_replicas": 1, "num_stages": 6}, num_stages="auto"),
         "omnibal.pipeline.encoder must leave processes to the language model, got 6 stages × 1 replica of 3"),
    ]  # fmt: skip
    by_rank = launch(3, "tests.engine.cases:early_refusals", [config for config, _ in cases])
    for heard in by_rank:
        for said, (_, message) in zip(heard, cases, strict=True):
            assert message in str(said)
