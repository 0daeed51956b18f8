"""An encoder on all ranks computes what plain transformers computes, whatever pipeline its features enter."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from omnibal.cli.main import app
from omnibal.cluster import Encoder
from omnibal.engine.checkpoint import export
from omnibal.engine.resolve import check_run
from omnibal.errors import ConfigError
from omnibal.plan import Plan
from omnibal.vlm import load_model
from tests.engine.cases import changed, run_of, settings
from tests.engine.demo import demo_config
from tests.engine.launch import all_end, launch
from tests.engine.small import Case, plain_training, save_small_model, small_samples
from tests.engine.test_units import (
    ADAM,
    BFLOAT16,
    CLIPPING,
    MIXED,
    ONE,
    STEPS,
    TWO,
)
from tests.families.models import small_config
from tests.vlm.families import plain_family_model

pytestmark = pytest.mark.distributed


def spread(boundaries, packs, **more):
    """A case whose stages are cut in the language model: the first one's layers begin with the encoder's five."""
    ranks = (len(boundaries) - 1) * len(packs)
    return Case(boundaries, packs, encoder=Encoder(0, ranks, placement="spread"), **({"recompute": MIXED} | more))


CLIPPED = {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}, "gradient_clipping": CLIPPING}
TRAINED = {
    2: [
        spread((0, 7, 10), ONE, zero_stage=1, extra=CLIPPED),
        spread((0, 10), TWO, extra=CLIPPED | {"gradient_clipping": 0.0}),
    ],
    4: [
        spread((0, 7, 10), TWO, zero_stage=1, extra=CLIPPED),
        spread((0, 7, 10), TWO, zero_stage=1, extra=CLIPPED | BFLOAT16),
    ],
}
SHARED = [
    spread((0, 7, 10), TWO, zero_stage=1, extra=extra) for extra in ({}, BFLOAT16)
]  # two of DeepSpeed's optimizers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("model", "tied")}
    for name, folder in found.items():
        save_small_model(folder, tied=name == "tied")
    return found


@pytest.fixture(scope="module")
def model(models):
    return models["model"]


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_plain_transformers_and_a_resumed_run_every_bit_of_one_that_went_on(
    num_processes, model, tmp_path
):
    plain = {
        clipping: plain_training(
            model, small_samples(), make_optimizer=partial(torch.optim.AdamW, **ADAM), clipping=clipping or 1e9,
            make_scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1), steps=STEPS,
        )
        for clipping in {case.extra["gradient_clipping"] for case in TRAINED[num_processes]}
    }  # fmt: skip
    assert min(plain[CLIPPING][1]) > 2 * CLIPPING  # every step is clipped
    cases = [replace(case, model=str(model), steps=STEPS) for case in TRAINED[num_processes]]
    for results in launch(num_processes, "tests.engine.cases:steps_with_a_resume", cases, str(tmp_path)):
        for case, (whole, resumed) in zip(cases, results, strict=True):
            assert resumed["losses"] == whole["losses"][-1:]
            assert resumed["norms"] == whole["norms"][-1:]
            assert all(torch.equal(weight, whole["weights"][name]) for name, weight in resumed["weights"].items())
            assert resumed["weights"].keys() == whole["weights"].keys() != set()
            losses, norms, weights = plain[case.extra["gradient_clipping"]]
            is_exact = "bf16" not in case.extra
            assert whole["losses"] == pytest.approx(losses, rel=1e-4 if is_exact else 0.02)
            assert whole["norms"] == (
                pytest.approx(norms, rel=1e-3 if is_exact else 0.1) if case.zero_stage else [None] * STEPS
            )
            for name, weight in whole["weights"].items() if is_exact else ():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.cluster(2)
def test_all_end_when_one_is_killed(model, tmp_path):
    case = spread((0, 7, 10), ONE, model=str(model), zero_stage=1)
    assert all_end(2, "tests.engine.cases:steps_until_killed", case, 1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_stage_computes_what_rearranged_samples_do(tmp_path):
    family, packs = "qwen2_5_vl", [[[0, 1], [4]], [[2, 6], [3, 5]]]
    plain_family_model(small_config(family)).save_pretrained(tmp_path)
    whole = (0, len(load_model(tmp_path).records))
    case = spread(whole, packs, model=str(tmp_path), zero_stage=1, recompute=("none",))
    for apart, rearranged in launch(2, "tests.engine.rearranged:spread_and_rearranged", case, family):
        assert apart["loss"] == pytest.approx(rearranged["loss"], rel=1e-6)
        assert apart["gradients"].keys() == rearranged["gradients"].keys()
        assert max(gradient.abs().max() for gradient in rearranged["gradients"].values()) > 0.1
        for name, gradient in apart["gradients"].items():  # but for the order of sums
            torch.testing.assert_close(gradient, rearranged["gradients"][name], rtol=0, atol=1e-6, msg=name)


def test_all_ranks_share_the_optimizer_state_of_the_encoder(model):
    cases = [replace(case, model=str(model)) for case in SHARED]
    records = load_model(model).records
    encoder, first, last = (
        sum(record.trainable_parameters(()) for record in part) for part in (records[:5], records[5:7], records[7:])
    )
    for by_case in zip(*launch(4, "tests.engine.cases:optimizer_shares", cases), strict=True):
        for rank, (on_all, own) in enumerate(by_case):
            assert on_all == pytest.approx(encoder / 4, abs=8)  # flat buffers are padded
            assert own == pytest.approx((first, last)[rank // 2] / 2, abs=8)


@pytest.mark.cluster(2)
def test_it_is_evaluated_and_exported_as_the_pipeline_is(model, tmp_path):
    pipeline = Case((0, 7, 10), ONE, str(model), MIXED, zero_stage=1)
    both = [spread((0, 7, 10), ONE, model=str(model), zero_stage=1), pipeline]
    by_rank = launch(2, "tests.engine.cases:evaluated_and_saved", both, str(tmp_path))
    for apart, whole in by_rank:
        assert apart["evaluation"].loss == pytest.approx(whole["evaluation"].loss, rel=1e-5)
        assert apart["evaluation"].samples == whole["evaluation"].samples > 0
    export(tmp_path / "0" / "end", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    trained = {name: weight for results in by_rank for name, weight in results[0]["weights"].items()}
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())


def test_a_key_of_the_ds_config_spreads_the_encoder_of_a_run_on_a_dataset(model, tmp_path):
    config = changed(settings(model, num_stages=2), "run", max_steps=STEPS)
    apart = changed(config, "pipeline", encoder="spread")
    refused = [
        (apart | {"zero_optimization": {"stage": 1, "contiguous_gradients": True}},
         "zero_optimization.contiguous_gradients must be left out where the encoder is spread"),
        (changed(apart, "pipeline", partition=[0, 3, 10]), "the first stage of the partition must end in the language "
         "model, which begins with layer 5, where the encoder is spread, got an end before layer 3"),
    ]  # fmt: skip
    by_rank = launch(2, "tests.engine.cases:spread_by_key", config, apart, [each for each, _ in refused], str(tmp_path))
    for result in by_rank:
        assert result["apart"]["losses"] == pytest.approx(result["whole"]["losses"], rel=1e-4)
        for said, (_, message) in zip(result["refused"], refused, strict=True):
            assert message in said
        assert re.search(r"encoder must be that of the checkpoint .* \(spread\) to resume, got None", result["resumed"])
    weights = by_rank[0]["whole"]["weights"] | by_rank[1]["whole"]["weights"]
    for result in by_rank:
        assert {name for name in weights if "vision" in name} < result["apart"]["weights"].keys()
        for name, weight in result["apart"]["weights"].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)


def test_a_plan_is_made_entered_trained_resumed_and_exported(tmp_path):
    config = demo_config(tmp_path)
    config = changed(config, "pipeline", encoder="spread") | {"bf16": {"enabled": True}}
    config = changed(config, "run", epochs=1, max_steps=3, save_every=2, keep=3, evaluate_every=0)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["plan", str(file), "--cluster", "2xA100-80GB", "--num-stages", "2", "--write"])
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "run" / "plan.json")
    by_rank = launch(2, "tests.engine.going_on:begun_and_resumed", str(file))
    for whole, again in by_rank:
        assert whole["layout"] == again["layout"] == str(plan.layout) == "2 stages × 1 replica, encoder on all"
        assert whole["loss"] == again["loss"]
        assert whole["weights"].keys() == again["weights"].keys()
        assert all(torch.equal(weight, again["weights"][name]) for name, weight in whole["weights"].items())
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model", dtype="auto").state_dict()
    named = {load_model(tmp_path / "run" / "model").disk_name(name): weight for name, weight in exported.items()}
    for weights in (again["weights"] for _, again in by_rank):
        assert all(torch.equal(named[name], weight) for name, weight in weights.items())


REFUSED = {
    "zero_optimization.contiguous_gradients must be left out": {
        "extra": {"zero_optimization": {"stage": 1, "contiguous_gradients": True}}
    },
    "the first stage of the partition must end in the language model, which begins with layer 5": {
        "boundaries": (0, 5, 10)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_spread_encoder_cannot_run_with_is_refused(message, model):
    asked = REFUSED[message]
    case = spread(asked.get("boundaries", (0, 7, 10)), ONE, model=str(model), extra=asked.get("extra", {}))
    resolved, plan = run_of(case, num_replicas=1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(resolved, plan.partition)
