"""A checkpoint goes on in other layouts, with other ZeRO and micro-batches as the run that changes nothing."""

import re
from functools import partial

import pytest
import torch

from tests.engine.cases import SmallDataset, changed, settings
from tests.engine.elastic import COPIES
from tests.engine.launch import launch
from tests.engine.small import save_small_model

pytestmark = [pytest.mark.distributed, pytest.mark.cluster(2, together=True)]
PAIRS, FOUR, SIX = ({"gradient_accumulation_steps": number} for number in (2, 4, 6))
BF16 = {"bf16": {"enabled": True}}
GROUPS = {"learning_rates": {"vision": 5e-3, "projector": 5e-3}, "weight_decay": "matrices"}


def config_of(model, num_stages, zero_stage, extra=None, **pipeline):
    """As many packs in a step of two processes, whatever the stages."""
    batch = {} if extra else {"gradient_accumulation_steps": 2 * num_stages}
    batch |= {"gradient_clipping": 0.0} | (extra or {})
    config = settings(model, num_stages=num_stages, zero_stage=zero_stage, extra=batch)
    return changed(config, "pipeline", **pipeline)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("checkpoints")
    save_small_model(model, tied=True)
    # Groups of which the second stage has some for placeholders only; the tied weight leaves the first stage.
    grouped = [
        changed(config_of(model, stages, zero, BF16 | batch), "optimizer", **GROUPS)
        for stages, zero, batch in ((1, 1, PAIRS), (2, 0, FOUR))
    ]
    for config in grouped:
        del config["scheduler"]
    shared = config_of(model, 1, 1, FOUR, num_tensor=2), config_of(model, 2, 0, FOUR)
    pairs = [(config_of(model, 2, 1), config_of(model, 1, 0)), grouped, shared]
    third = config_of(model, 2, 0, partition=[0, 6, 10], schedule="zero-bubble", recompute="none")
    batches = config_of(model, 1, 1, {"gradient_accumulation_steps": 3})
    return launch(2, "tests.engine.elastic:moves_and_more", pairs, third, batches, str(folder))


def runs_of(moved):
    """The runs from a checkpoint, each with the weights of all ranks; the first one stays."""
    for by_rank in zip(*moved, strict=True):
        joined = {"weights", "copies"} & by_rank[0].keys()
        yield by_rank[0] | {key: {name: each for run in by_rank for name, each in run[key].items()} for key in joined}


def check_alike(runs, most, mean):
    """Whether weights differ by at most so much, and on average, and samples do not."""
    whole, *others = runs
    for run in others:
        count = len(run["samples"])
        assert run["samples"] == whole["samples"][-count:]
        assert run["weights"].keys() == whole["weights"].keys()
        pairs = [(weight.float(), whole["weights"][name].float()) for name, weight in run["weights"].items()]
        differences = torch.cat([(weight - other).abs().flatten() for weight, other in pairs])
        assert differences.max() < most
        assert differences.mean() < mean


@pytest.mark.parametrize(("number", "most", "mean"), [(0, 1e-6, 1e-8), (1, 1e-2, 2e-4), (2, 1e-6, 1e-8)])
def test_weights_and_samples_are_those_of_the_run_that_stays(found, number, most, mean):
    check_alike(runs_of([rank["moved"][number] for rank in found]), most, mean)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_more_processes_tensor_ranks_and_an_encoder_with_replicas_of_its_own(num_processes, tmp_path):
    save_small_model(tmp_path / "model", num_attention_heads=4)  # of the ViT, which four tensor ranks share
    config = partial(config_of, tmp_path / "model")
    adapted = [changed(config(*own), "model", lora={"rank": 2}) for own in ((1, 1, FOUR), (2, 0, FOUR))]
    frozen = [changed(config(*own), "model", frozen=["vision"]) for own in ((1, 1, BF16 | FOUR), (2, 1, BF16 | FOUR))]
    pairs = {
        2: [(changed(one, "pipeline", num_tensor=2), two) for one, two in (adapted, frozen)],
        3: [(config(3, 1, FOUR), config(2, 1, PAIRS, encoder={"num_replicas": 1}))],
        4: [
            (config(2, 1, PAIRS), config(1, 1, {"gradient_accumulation_steps": 1})),
            (config(2, 1, PAIRS, encoder="spread"), config(4, 0, FOUR, encoder="spread")),
            (config(4, 1, SIX), config(2, 0, SIX, encoder={"num_replicas": 3})),
            (config(2, 1, PAIRS), config(2, 0, FOUR, num_tensor=2)),
            (config(1, 1, FOUR, num_tensor=4), config(1, 1, PAIRS, num_tensor=2)),
        ],
    }
    both_ways = [pair[::order] for pair in pairs[num_processes] for order in (1, -1)]
    by_rank = launch(num_processes, "tests.engine.elastic:moves", both_ways, str(tmp_path / "checkpoints"))
    for number, moved in enumerate(zip(*by_rank, strict=True)):
        near = (1e-6, 1e-8)
        if num_processes == 2:  # Adam divides by adapters' small gradients; bfloat16
            near = (1e-5, 1e-7) if number < 2 else (2e-2, 2e-4)
        check_alike(runs_of(moved), *near)


def test_float32_copies_keep_every_bit(found):
    whole, there, _ = runs_of([rank["moved"][1] for rank in found])
    assert len(whole["copies"]) > 9
    assert whole["copies"].keys() == there["copies"].keys()
    assert all(torch.equal(copy, there["copies"][name]) for name, copy in whole["copies"].items())
    assert any((copy != copy.bfloat16().float()).any() for copy in whole["copies"].values())


def test_each_group_keeps_its_own_rate_whatever_the_order_of_weights_on_ranks(found):
    kinds = [(name, more) for name in ("parameters", "projector", "vision") for more in ("", ", without weight decay")]
    for rank in found:
        for run in rank["moved"][1]:  # StepLR has halved rates twice
            assert [*run["rates"].items()] == [
                (name + more, pytest.approx((0.01 if name == "parameters" else 5e-3) / 4)) for name, more in kinds
            ]


def test_other_micro_batches_leave_no_sample_out_and_a_schedule_ends_with_the_run(found):
    stayed, *_ = found[0]["moved"][0]
    run = found[0]["batches"]
    assert {len(samples) for _, samples in run["samples"]} != {len(samples) for _, samples in stayed["samples"]}
    done = stayed["before"] + run["samples"]
    assert sorted(sample for _, samples in done for sample in samples) == [*range(len(SmallDataset(COPIES)))]
    total, steps = run["steps"]
    assert total == steps
    (told,) = run["told"]
    for change in (
        "partition [0, 10] (was [0, 3, 10])",
        "num_replicas 2 (was 1)",
        "gradient_accumulation_steps 3 (was 4)",
        f"scheduler.params.total_num_steps {steps} (was ",
    ):
        assert change in told


def test_state_that_is_missing_or_of_another_kind_is_named(found):
    for rank in found:
        missing, blocks = rank["batches"]["refused"]
        assert "must hold the optimizer's state of 1464 weights of language_model.model.embed_tokens.weight" in missing
        assert re.search(r"exp_avg must have a number for each weight .* in .*zero_pp_rank_0_mp_rank_01", blocks)
