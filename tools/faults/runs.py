"""What the processes of a run do that is to be killed: train, save and export, and note the samples of each step."""

import json
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from omnibal.engine.checkpoint import newest_first
from omnibal.engine.engine import OmnibalEngine
from omnibal.train import train
from tests.engine.cases import SmallDataset, changed, settings, weights_of

STEPS = 6
MET = "met"  # a file that is there once ranks can notice that one of them ends
ENCODER = {"units": {"num_replicas": 1}, "spread": "spread"}
ASYNC = ("pipeline", "units")  # layouts whose checkpoints threads write while training goes on


def config_of(layout: str, model: str, output: str) -> dict[str, object]:
    """The ds_config of a layout."""
    config = settings(model, num_stages=1 if layout == "tensor" else 2)
    config = changed(config, "run", output=output, max_steps=STEPS, save_every=1, keep=2, async_save=layout in ASYNC)
    if layout in ENCODER:
        config = changed(config, "pipeline", encoder=ENCODER[layout])
    if layout == "tensor":
        config = changed(config, "pipeline", num_tensor=2)
    return config


def run(layout: str, model: str, folder: str) -> float:
    """Train to the end, from the newest whole checkpoint if there is one; seconds until the first step."""
    started = perf_counter()
    begun: list[float] = []
    trained = OmnibalEngine._train  # which the step whose memory is measured takes, too

    def noted(engine: OmnibalEngine, *arguments: object) -> torch.Tensor:
        begun.append(perf_counter() - started)
        loss = trained(engine, *arguments)
        packs = [engine._samples_of(dist.get_rank(), number) for number in range(engine.micro_batches)]
        note(folder, engine.global_steps, packs)
        return loss

    OmnibalEngine._train = noted  # type: ignore[method-assign]
    output = Path(folder) / "run"
    dataset = SmallDataset()
    resume = bool(newest_first(output / "checkpoints"))
    meet(Path(folder))
    try:
        engine = train(config_of(layout, model, str(output)), dataset=dataset, resume=resume)
    finally:
        OmnibalEngine._train = trained  # type: ignore[method-assign]
    torch.save(weights_of(engine), Path(folder) / f"final{dist.get_rank()}.pt")
    return begun[0] if begun else 0.0


def meet(folder: Path) -> None:
    """Wait until all ranks have looked for a checkpoint before one writes, and leave word that they have met."""
    dist.barrier()
    (folder / MET).touch()


def note(folder: str | Path, step: int, packs: list[list[int]]) -> None:
    with (Path(folder) / f"samples{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps([step, packs]) + "\n")
