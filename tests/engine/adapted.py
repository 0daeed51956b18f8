"""What the processes of the tests of LoRA run."""

from pathlib import Path

import torch

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
    engine.save_16bit_model(folder / "whole")
    found = {"losses": losses, "norms": norms, "gradients": list(gradients), "weights": weights_of(engine)}
    again = engine_of(case)
    again.load_checkpoint(folder, "before")
    loss, weights = again.train_batch().item(), weights_of(again)
    same = [name for name, weight in weights.items() if torch.equal(weight, found["weights"][name])]
    return found | {"resumed_loss": loss, "resumed_alike": len(same) == len(weights)}
