"""The drop-in's run that is to be killed; apart, since ranks take seconds to import what it needs."""

import json
import os
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from omnibal.integrations.transformers import balance
from tests.integrations.trainers import LIMITS, Case, accelerate_afresh, samples_under_limits, trainer_of, weights_of
from tools.faults.runs import STEPS, meet, note


class _Samples(TrainerCallback):
    def __init__(self, folder: Path, dataset: object) -> None:
        self.folder, self.read, self.begun = folder, dataset.read, 0.0  # type: ignore[attr-defined]

    def on_step_begin(self, args: object, state: object, control: object, **others: object) -> None:
        self.begun = self.begun or perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **others: object) -> None:
        sampler = others["train_dataloader"].batch_sampler  # type: ignore[attr-defined]
        sampler = getattr(sampler, "batch_sampler", sampler)  # Accelerate's, which skips
        step = (state.global_step - 1) % sampler.num_steps  # type: ignore[attr-defined]
        note(self.folder, state.global_step, sampler.packs_of_all_ranks(step)[sampler.rank])  # type: ignore[attr-defined]


def run(layout: str, model: str, name: str) -> float:
    """As `tools.faults.runs.run`, with ``balance`` under transformers.Trainer."""
    started, folder = perf_counter(), Path(name)
    case = Case("internvl", "zero1")
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": STEPS}
    # ZeRO's own AdamW, so that there are moments to bring back.
    options |= {"optim": "adamw_torch", "learning_rate": 1e-3}
    with accelerate_afresh():
        trainer = trainer_of(case, folder / "run", **options)
        balance(trainer, LIMITS[case.family], samples_per_step=samples_under_limits(trainer))
        noted = _Samples(folder, trainer.train_dataset)
        trainer.add_callback(noted)
        checkpoint = newest_of_trainer(folder / "run")
        meet(folder)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        torch.save(weights_of(trainer.model), folder / f"final{dist.get_rank()}.pt")
    return noted.begun - started if noted.begun else 0.0


def newest_of_trainer(folder: Path) -> Path | None:
    """Trainer's newest checkpoint with the files of all ranks: a kill leaves one in part under its name."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True)
    ranks = range(int(os.environ["WORLD_SIZE"]))
    return next((path for path in found if all(_loads(path / f"rng_state_{rank}.pth") for rank in ranks)), None)


def _loads(path: Path) -> bool:
    """Whether the last file that a rank writes is there, and rank 0's record behind it."""
    try:
        torch.load(path, weights_only=False)
        json.loads((path.parent / "trainer_state.json").read_text())
    except (OSError, RuntimeError, EOFError, ValueError):
        return False
    return True
