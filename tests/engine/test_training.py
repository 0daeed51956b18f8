"""Several steps with clipping, AdamW and a schedule leave the weights that a plain training loop leaves."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR

from omnibal.config import complete_deepspeed_config, fill_in_steps, layout_of
from tests.engine.launch import launch
from tests.engine.small import Case, plain_training, save_small_model, small_samples

pytestmark = pytest.mark.distributed

STEPS, CLIPPING = 6, 0.05
# Adam divides by the size of a gradient: its usual epsilon would make full steps of a zero that rounding blurs.
ADAM = {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.01, "eps": 1e-3}
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
    "gradient_clipping": CLIPPING,
}
TWO_STAGES = ((0, 4, 10), [[[0, 1], [2], [4, 7], [3, 5, 6]]])
TWO_REPLICAS = ((0, 10), [[[0, 1], [4, 7]], [[3, 5, 6], [2]]])


RATES = {"vision": 1e-3, "projector": 2e-2}
GROUPED = {"weight_decay": "matrices", "learning_rates": RATES}
MODULES = {"vision_tower": "vision", "multi_modal_projector": "projector"}


def grouped(parameters, rates):
    """Each parameter a group of its own, with its module's rate, and decay of matrices only."""
    for name, parameter in parameters.items():
        rate = rates.get(MODULES.get(name.partition(".")[0]))
        decayed = (name.endswith("weight") and "norm" not in name) or "token" in name or "position" in name
        yield (
            {"params": [parameter]}
            | ({} if rate is None else {"lr": rate})
            | ({} if decayed else {"weight_decay": 0.0})
        )


def expected(folder, **options):
    config = complete_deepspeed_config(SETTINGS, layout_of(SETTINGS, 1, 1))
    fill_in_steps(config["scheduler"]["params"], STEPS)
    losses, norms, weights = plain_training(
        folder,
        small_samples(),
        make_optimizer=partial(torch.optim.AdamW, **ADAM),
        make_scheduler=partial(WarmupCosineLR, **config["scheduler"]["params"]),
        clipping=CLIPPING,
        steps=STEPS,
        **options,
    )
    assert min(norms) > 2 * CLIPPING  # every step is clipped
    return losses, norms, weights


def test_groups_of_parameters_train_as_plain_transformers_does(tmp_path):
    save_small_model(tmp_path)
    cases = [
        Case(boundaries, packs, str(tmp_path), zero_stage=1, steps=STEPS, extra=SETTINGS)
        for boundaries, packs in (TWO_STAGES, TWO_REPLICAS)
    ]
    matrices, apart = (expected(tmp_path, grouped=partial(grouped, rates=rates)) for rates in ({}, RATES))
    own = {"optimizer": partial(torch.optim.AdamW, **ADAM)}
    cases = [
        (replace(cases[0], grouped={"weight_decay": "matrices"}), matrices),
        (replace(cases[1], grouped=GROUPED, own=own), apart),
        (replace(cases[0], grouped=GROUPED), apart),  # stages train other modules
    ]
    by_rank = launch(2, "tests.engine.cases:several_steps", [case for case, _ in cases])
    assert [[result["read"] for result in results[:2]] for results in by_rank] == [
        [[0, 1, 2, 3], [*range(10)]],
        [[*range(4, 10)], []],  # a second replica reads nothing
    ]
    for results in by_rank:
        for result, (_, (losses, norms, weights)) in zip(results, cases, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
            assert result["norms"] == pytest.approx(norms, rel=1e-3)
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)
