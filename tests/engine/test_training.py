"""Several steps with clipping, AdamW and a schedule leave the weights that a plain training loop leaves."""

from functools import partial

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR

from omnibal.config import complete_deepspeed_config
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


@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_plain_transformers(tied, tmp_path):
    save_small_model(tmp_path, tied=tied)
    config = complete_deepspeed_config(SETTINGS, num_stages=1, num_replicas=1, total_steps=STEPS)
    losses, norms, weights = plain_training(
        tmp_path,
        small_samples(),
        make_optimizer=partial(torch.optim.AdamW, **ADAM),
        make_scheduler=partial(WarmupCosineLR, **config["scheduler"]["params"]),
        clipping=CLIPPING,
        steps=STEPS,
    )
    assert min(norms) > 2 * CLIPPING  # every step is clipped
    cases = [
        Case(boundaries, packs, str(tmp_path), zero_stage=1, steps=STEPS, extra=SETTINGS)
        for boundaries, packs in (TWO_STAGES, TWO_REPLICAS)
    ]
    by_rank = launch(2, "tests.engine.cases:several_steps", cases)
    assert [[result["read"] for result in results] for results in by_rank] == [
        [[0, 1, 2, 3], [*range(9 if tied else 10)]],  # a tied head has been read
        [[*range(4, 9 if tied else 10)], []],  # a second replica reads nothing
    ]
    for results in by_rank:
        for result in results:
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
            assert result["norms"] == pytest.approx(norms, rel=1e-3)
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=name)
