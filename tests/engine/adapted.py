"""What the processes of the tests of LoRA run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnibal.errors import ConfigError
from tests.engine.cases import engine_of, weights_of


def train_and_resume(cases, folder):
    """Losses, norms, gradients and weights of each case, as this rank has them, and what its last step is again.

    A checkpoint from before the last step is resumed for that, and left in a folder of the case's number.
    """
    return [_train_and_resume(case, Path(folder) / str(number)) for number, case in enumerate(cases)]


def _train_and_resume(case, folder):
    gradients = []
    case.own["on_gradient"] = lambda name, gradient: gradients.append((name, gradient.clone()))
    engine, losses, norms = engine_of(case), [], []
    for step in range(case.steps):
        losses.append(engine.train_batch().item())
        norms.append(float(engine.get_global_grad_norm()))
        if step == case.steps - 2:
            engine.save_checkpoint(folder, "before")
    engine.save_checkpoint(folder, "end")
    found = {"losses": losses, "norms": norms, "gradients": list(gradients), "weights": weights_of(engine)}
    moved = shutil.copytree(case.model, folder / f"moved{engine.global_rank}")
    again = engine_of(replace(case, model=str(moved)))
    again.load_checkpoint(folder, "before")
    loss, weights = again.train_batch().item(), weights_of(again)
    same = [name for name, weight in weights.items() if torch.equal(weight, found["weights"][name])]
    change(moved)
    with pytest.raises(ConfigError, match=r"base_weights must be that of the checkpoint .*/end \(\w{8}\) to res"):
        again.load_checkpoint(folder, "end")
    return found | {"resumed_loss": loss, "resumed_alike": len(same) == len(weights)}


def change(model):
    """Change one weight of a model's folder."""
    (file,) = model.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
