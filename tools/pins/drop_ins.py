"""What two processes of the pins run: a Trainer under ``balance``, and a stream."""

import hashlib
from pathlib import Path

from omnibal.integrations.transformers import balance
from tests.integrations.test_streams import MIXTURE, several, stream_of, taken
from tests.integrations.trainers import LIMITS, Case, accelerate_afresh, samples_under_limits, trainer_of, weights_of


def train_and_draw(folder: Path) -> dict[str, object]:
    """Losses and weights of three steps of each Trainer, and what this rank draws of a stream."""
    found: dict[str, object] = {}
    for case in (Case("internvl"), Case("qwen2_5_vl", "zero2")):
        with accelerate_afresh():
            trainer = trainer_of(case, folder / case.family, max_steps=3, logging_strategy="steps", logging_steps=1)
            balance(trainer, LIMITS[case.family], samples_per_step=samples_under_limits(trainer))
            trainer.train()
            name = f"trainer {case.family} {case.layout}"
            found[f"{name} losses"] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            digest = hashlib.sha256()
            for weight in weights_of(trainer.model).values():
                digest.update(weight.float().numpy().tobytes())
            found[f"{name} weights"] = digest.hexdigest()[:16]
    found["stream"] = taken(stream_of(several(), mixture=MIXTURE), 40)
    return found
