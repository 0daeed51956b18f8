"""Where two real processes wait, against the rule: python -m tools.replay.rule.

The layers sleep for given seconds, so other programs hardly count: what is left is when DDP, and DeepSpeed's ZeRO 1, 2
and 3, make ranks wait for each other. A step's time is that between the ends of its slowest rank's steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from omnibal.advise.wait import MEETINGS, PHASES, wait
from omnibal.processes import free_port
from tools.bench import head

RANKS, STEPS, WARM_UP = 2, 6, 2
TRAINERS = ("ddp", "zero1", "zero2", "zero3")


def costs_of(micro_batches: int, longest: float) -> dict[str, np.ndarray]:
    """Made-up seconds, shape (steps, ranks, micro-batches): backward passes take twice as long as forward ones."""
    generator = np.random.default_rng(micro_batches)
    shape = (STEPS + WARM_UP, RANKS, micro_batches)
    vision, language = generator.uniform(0.1 * longest, longest, (2, *shape))
    return dict(zip(PHASES, (vision, language, 2 * language, 2 * vision), strict=True))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, forward: float, backward: float) -> Tensor:
        context.seconds = backward
        time.sleep(forward)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.seconds)
        return gradient, None, None


class _Part(nn.Module):
    """A part of the model, whose weights are gathered before it sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(64, 64), (0.0, 0.0)

    def forward(self, tensor: Tensor) -> Tensor:
        # within the span of the weights in both passes
        slept: Tensor = _Sleep.apply(self.linear(tensor), *self.seconds)
        return slept


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language, self.head = _Part(), _Part(), nn.Linear(64, 1)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.head(self.language(self.vision(tensor))).sum()


def run_rank(trainer: str, micro_batches: int, longest: float, out: Path) -> None:
    """One rank's steps; writes when each of them ended."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    costs = costs_of(micro_batches, longest)
    model = _Model()
    if trainer == "ddp":
        engine, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.0)
    else:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "zero_optimization": {"stage": int(trainer[-1]), "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    inputs = torch.ones(1, 64, requires_grad=True)
    ends = []
    for step in range(STEPS + WARM_UP):
        for number in range(micro_batches):
            of = {phase: float(seconds[step, rank, number]) for phase, seconds in costs.items()}
            model.vision.seconds = of["vision forward"], of["vision backward"]
            model.language.seconds = of["language forward"], of["language backward"]
            is_last = number == micro_batches - 1
            with engine.no_sync() if trainer == "ddp" and not is_last else nullcontext():
                loss = engine(inputs)
                loss.backward() if trainer == "ddp" else engine.backward(loss)
            if trainer != "ddp":
                engine.step()
        if trainer == "ddp":
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.monotonic())
    (out / f"{rank}.json").write_text(json.dumps(ends))
    dist.barrier()
    dist.destroy_process_group()


def measure(trainer: str, micro_batches: int, longest: float) -> tuple[float, float]:
    """Seconds of all counted steps: measured, and by the rule."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--rank", trainer, str(micro_batches), str(longest), folder],
                env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for process in ranks:
            _, errors = process.communicate(timeout=300)
            if process.returncode:
                raise RuntimeError(errors[-2000:])
        ends = np.array([json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)])
    slowest = ends.max(axis=0)
    costs = {phase: seconds[WARM_UP:] for phase, seconds in costs_of(micro_batches, longest).items()}
    waits = wait(costs, trainer)
    by_rule = sum(seconds[:, 0].sum() for seconds in costs.values()) + sum(w[:, 0].sum() for w in waits.values())
    return float(slowest[-1] - slowest[WARM_UP - 1]), float(by_rule)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--longest", type=float, default=0.15, help="Seconds of the longest forward pass of a part.")
    given = parser.parse_args()
    if given.rank:
        trainer, micro_batches, longest, folder = given.rank
        run_rank(trainer, int(micro_batches), float(longest), Path(folder))
        return
    print(
        head(
            ["trainer", "micro-batches", "ranks meet", "measured s", "rule s", "measured over rule", "no rank waits s"]
        )
    )
    for trainer in TRAINERS:
        for micro_batches in (1, 4):
            measured, by_rule = measure(trainer, micro_batches, given.longest)
            alone = sum(seconds[WARM_UP:, 0].sum() for seconds in costs_of(micro_batches, given.longest).values())
            figures = f"{measured:.2f} | {by_rule:.2f} | {measured / by_rule:.3f} | {alone:.2f}"
            print(f"| {trainer} | {micro_batches} | {MEETINGS[trainer].replace('_', '-')} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
