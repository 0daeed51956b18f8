"""Cells of the matrix under transformers.Trainer: packs, and rearranged samples."""

from omnibal.integrations.transformers import balance, rearrange
from tests.engine.matrix import BFLOAT16, STEPS, drop_in_items
from tests.integrations import trainers
from tests.integrations.items import Collate


class DropIn(trainers.Case):
    """A cell as the trainer's tests have cases."""

    cell = None

    @classmethod
    def of(cls, cell):
        layout = f"zero{cell.zero}" if cell.zero else "ddp"
        options = {"gradient_checkpointing": cell.recompute == "full", "bf16": cell.dtype == "bfloat16"}
        if cell.zero:
            zero = trainers.zero_config(cell.zero) | {"gradient_clipping": cell.clipping}
            options["deepspeed"] = zero | (BFLOAT16 if cell.dtype == "bfloat16" else {})
        case = cls(cell.family, layout, options=options)
        object.__setattr__(case, "cell", cell)
        return case

    def model(self):
        return self.cell.plain_model()[0]


def train_drop_in(cell, folder):
    """The same of a trainer under SGD, whose first step tells its gradients; and each step's samples."""
    items = drop_in_items(cell.family, cell.data)
    more = {"max_steps": STEPS, "logging_strategy": "steps", "logging_steps": 1, "max_grad_norm": cell.clipping}
    with trainers.accelerate_afresh():
        trainer = trainers.trainer_of(DropIn.of(cell), folder, **more)
        trainer.train_dataset.items, trainer.data_collator = items, Collate(cell.family)
        weights = trainers.Weights(trainer)
        trainer.add_callback(weights)
        if cell.layout == "packs":
            asked = trainers.samples_under_limits(trainer)
            sampler = balance(trainer, trainers.LIMITS.get(cell.family), samples_per_step=asked)
        else:
            rearrange(trainer)
        trainer.train()
        if cell.layout == "packs":
            steps = []
            for step in range(STEPS):
                sampler.set_epoch(step // sampler.num_steps)
                packs = sampler.packs_of_all_ranks(step % sampler.num_steps)
                steps.append([sample for pack in packs for sample in pack])
        else:
            steps = trainers.steps_of_draws(trainer, STEPS)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    before, after = weights.steps[:2]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry["grad_norm"]) if cell.clips else None for entry in logged],
        "gradients": {name: (before[name] - after[name]) / trainers.LEARNING_RATE for name in before},
        "weights": weights.steps[-1],
        "samples": steps,
        "skipped": 0,
    }
