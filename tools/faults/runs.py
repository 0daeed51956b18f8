"""What the processes of a run do that is to be killed: train, save and export, and note the samples of each step."""

import json
import os
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.saved_files import newest_first
from omnibal.integrations.transformers import balance
from omnibal.train import train
from tests.engine.cases import SmallDataset, changed, settings
from tests.engine.cases import weights_of as weights_of_engine
from tests.integrations.trainers import LIMITS, Case, accelerate_afresh, samples_under_limits, trainer_of, weights_of

STEPS = 6
MET = "met"  # a file that is there once ranks can notice that one of them ends
ENCODER = {"units": {"num_replicas": 1}, "spread": "spread"}


def config_of(layout: str, model: str, output: str) -> dict[str, object]:
    """The ds_config of a layout."""
    config = settings(model, num_stages=1 if layout == "tensor" else 2)
    config = changed(config, "run", output=output, max_steps=STEPS, save_every=1, keep=2)
    if layout in ENCODER:
        config = changed(config, "pipeline", encoder=ENCODER[layout])
    if layout == "tensor":
        config = changed(config, "pipeline", num_tensor=2)
    return config


def run(layout: str, model: str, folder: str) -> float:
    """Train to the end, from the newest whole checkpoint if there is one; seconds until the first step."""
    started = perf_counter()
    if layout == "drop-in":
        return _drop_in(Path(folder), started)
    begun: list[float] = []
    trained = OmnibalEngine._train  # which the step whose memory is measured takes, too

    def noted(engine: OmnibalEngine, *arguments: object) -> torch.Tensor:
        begun.append(perf_counter() - started)
        loss = trained(engine, *arguments)
        packs = [engine._samples_of(dist.get_rank(), number) for number in range(engine.micro_batches)]
        _note(folder, engine.global_steps, packs)
        return loss

    OmnibalEngine._train = noted  # type: ignore[method-assign]
    output = Path(folder) / "run"
    dataset = SmallDataset()
    resume = bool(newest_first(output / "checkpoints"))
    _meet(Path(folder))
    try:
        engine = train(config_of(layout, model, str(output)), dataset=dataset, resume=resume)
    finally:
        OmnibalEngine._train = trained  # type: ignore[method-assign]
    torch.save(weights_of_engine(engine), Path(folder) / f"final{dist.get_rank()}.pt")
    return begun[0] if begun else 0.0


def _meet(folder: Path) -> None:
    """Wait until all ranks have looked for a checkpoint before one writes, and leave word that they have met."""
    dist.barrier()
    (folder / MET).touch()


def _note(folder: str | Path, step: int, packs: list[list[int]]) -> None:
    with (Path(folder) / f"samples{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps([step, packs]) + "\n")


class _Samples(TrainerCallback):
    def __init__(self, folder: Path, dataset: object) -> None:
        self.folder, self.read, self.begun = folder, dataset.read, 0.0  # type: ignore[attr-defined]

    def on_step_begin(self, args: object, state: object, control: object, **others: object) -> None:
        self.begun = self.begun or perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **others: object) -> None:
        sampler = others["train_dataloader"].batch_sampler  # type: ignore[attr-defined]
        sampler = getattr(sampler, "batch_sampler", sampler)  # Accelerate's, which skips
        step = (state.global_step - 1) % sampler.num_steps  # type: ignore[attr-defined]
        _note(self.folder, state.global_step, sampler.packs_of_all_ranks(step)[sampler.rank])  # type: ignore[attr-defined]


def _drop_in(folder: Path, started: float) -> float:
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
        _meet(folder)
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
