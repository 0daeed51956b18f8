"""Every family that can be trained, cut within its ViT and within its language model, ends as plain transformers."""

import pytest
import torch

from omnibal.vlm import load_model
from tests.engine.launch import launch
from tests.engine.small import Case
from tests.families.models import small_config
from tests.vlm.families import TRAINED, family_samples, plain_family_model, plain_steps, tied_config

pytestmark = pytest.mark.distributed

STEPS, CLIPPING = 3, 0.05
# Adam divides by the size of a gradient: its usual epsilon would make full steps of a zero that rounding blurs.
ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-3}
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
    "gradient_clipping": CLIPPING,
}
PACKS = [[[0, 1], [2, 6], [4], [3, 5]]]  # the third one has no image


def cases_of(family, folder):
    """Cuts in the ViT and in the language model under both schedules, with none, some and all recomputed."""
    kinds = [record.kind for record in load_model(folder).records]
    in_vit, in_llm = (kinds.index(kind) + 2 for kind in ("vision_block", "decoder_block"))
    for cut, schedule, recompute in [
        (in_vit, "1f1b", ("none",)),
        (in_llm, "zero-bubble", ("full", "none", "selective")),
        (in_vit, "zero-bubble", ("full",)),
    ]:
        yield Case(
            (0, cut, len(kinds)),
            PACKS,
            str(folder),
            recompute,
            schedule=schedule,
            zero_stage=1,
            steps=STEPS,
            extra=SETTINGS,
        )


def test_weights_after_several_steps_are_those_of_plain_transformers(tmp_path):
    cases, expected = [], []
    for number, family in enumerate(TRAINED):
        config = tied_config(family) if number % 2 else small_config(family)
        folder = tmp_path / family
        plain_family_model(config).save_pretrained(folder)
        found = plain_steps(folder, family_samples(family), STEPS, clipping=CLIPPING, **ADAM)
        assert min(found[1]) > 2 * CLIPPING  # every step is clipped
        for case in cases_of(family, folder):
            cases.append(case)
            expected.append(found)
    for results in launch(2, "tests.engine.cases:several_steps", cases):
        for case, result, (losses, norms, weights) in zip(cases, results, expected, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-4), case
            assert result["norms"] == pytest.approx(norms, rel=1e-3), case
            assert result["weights"]
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=f"{name} in {case}")
