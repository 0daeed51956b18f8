"""Short real runs: predicted against measured peaks for each recompute level, and two stages under every schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.plan import Plan
from omnibal.processes import free_port
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS, Level, ModelProfile
from omnibal.vlm.measure import image_tokens_per_tile
from tools.gpu.one_device import rank_environment
from tools.gpu.report import Row

if TYPE_CHECKING:
    from omnibal.vlm.layers import VisionLanguageModel

GIB = 2**30
MICRO_BATCHES, STEPS, WARM_UP, PACK = 4, 5, 2, 4
"""Micro-batches of a step; steps that are run; those that are not timed; samples of a pack."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Runs:
    """Short runs of one model.

    Attributes:
        name: Of the model.
        model: The same.
        counted: What costs are counted for.
        tiles, tokens: Of a sample; a pack holds four.
        small: Whether this is a try without a GPU.
        timeout_seconds: For one run.
    """

    name: str
    model: VisionLanguageModel
    counted: Device
    tiles: int
    tokens: int
    small: bool
    timeout_seconds: float = 150

    def peaks(self) -> Iterator[Row]:
        """One stage at each recompute level."""
        size = len(self.model.records)
        for level in LEVELS:
            yield {"level": level} | self._row((0, size), (level,) * size, "1f1b", processes=1, shared=False)

    def pipelines(self, devices: int) -> Iterator[Row]:
        """Two stages under every schedule, over NCCL, also where they share a device."""
        size = len(self.model.records)
        one = None
        for schedule in SCHEDULES:
            row = self._row((0, size // 2, size), ("none",) * size, schedule, processes=2, shared=devices < 2)
            one = row["last loss"] if one is None else one
            yield {"schedule": schedule, **row, "loss as under the first": row["last loss"] == one}

    def replicas(self, devices: int) -> Iterator[Row]:
        """One stage on two replicas, which send each other gradients and weights early or when all are there."""
        size, losses = len(self.model.records), []
        for sent in ("beside the work", "behind it"):
            row = self._row(
                (0, size), ("none",) * size, "1f1b", processes=2, shared=devices < 2, early=sent == "beside the work",
            )  # fmt: skip
            losses.append(row["last loss"])
            yield {"sent": sent, **row, "loss as above": row["last loss"] == losses[0]}

    def _row(
        self,
        boundaries: Sequence[int],
        levels: tuple[Level, ...],
        schedule: ScheduleName,
        *,
        processes: int,
        shared: bool,
        early: bool = True,
    ) -> Row:
        limits, num_stages = PackLimits(PACK * self.tiles, PACK * self.tokens), len(boundaries) - 1
        layout = Layout(num_stages, processes // num_stages)
        plan = Plan(limits, MICRO_BATCHES, Partition(boundaries), levels, schedule=schedule, layout=layout)
        found = self._run(plan, processes, early)
        profile = analytic_profile(self.model.records, self.counted, dtype="bfloat16")
        targets = PACK * (self.tokens - self.tiles * image_tokens_per_tile(self.model))
        load = Load(limits.vision_units, limits.llm_tokens, PACK * self.tokens**2, target_tokens=targets)
        predicted = self._predicted(profile, load, plan)
        seconds = median(found["seconds"][WARM_UP:])
        work = [layer.forward_seconds + layer.backward_seconds + layer.weight_seconds for layer in profile.layers]
        busy = processes // plan.num_stages * MICRO_BATCHES * sum(float(cost(load)) for cost in work)
        return {
            "step s": seconds,
            "share of counted work": busy / seconds / (1 if shared else processes),
            "predicted GiB": ", ".join(f"{size / GIB:.2f}" for size in predicted),
            "measured GiB": ", ".join(f"{peak / GIB:.2f}" for peak in found["peak_bytes"]),
            "measured / predicted": ", ".join(
                f"{peak / size:.3f}" for peak, size in zip(found["peak_bytes"], predicted, strict=False)
            ),
            "GiB beside the model": ", ".join(f"{size / GIB:.2f}" for size in found["overhead_bytes"]),
            "last loss": found["losses"][-1],
        }

    def _predicted(self, profile: ModelProfile, load: Load, plan: Plan) -> list[int]:
        """Bytes of each stage's device at its peak, as the allocator counts; none for a level that is not counted."""
        if any(level not in layer.saved_bytes for layer, level in zip(profile.layers, plan.recompute, strict=True)):
            return []
        return [stage.total - stage.overhead for stage in plan.memory(profile, load)]

    def _run(self, plan: Plan, processes: int, early: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plan.save(folder / "plan.json")
            task = {
                "model": self.name, "small": self.small, "steps": STEPS, "output": str(folder / "out.json"),
                "early": early,
                "config": self._config(folder, plan.num_stages),
                "samples": {
                    "count": plan.layout.num_replicas * PACK * MICRO_BATCHES * (STEPS + 2),
                    "tiles": self.tiles, "tokens": self.tokens,
                    "pixels": self.model.pixel_shape[1], "tokens_per_tile": image_tokens_per_tile(self.model),
                },
            }  # fmt: skip
            (folder / "task.json").write_text(json.dumps(task))
            self._launch(folder, processes)
            return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]

    def _config(self, folder: Path, num_stages: int) -> dict[str, Any]:
        return {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "omnibal": {
                "model": {"weights": "random"},
                "pipeline": {"num_stages": num_stages, "plan": str(folder / "plan.json")},
                "run": {"output": str(folder / "run")},
            },
        }

    def _launch(self, folder: Path, processes: int) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tools.gpu.run_engine", "--task", str(folder / "task.json")]
        running, logs = [], [folder / f"{rank}.log" for rank in range(processes)]
        for rank in range(processes):
            environment = os.environ | rank_environment(rank, processes) | {
                "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            with logs[rank].open("w") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            codes = [process.wait(self.timeout_seconds) for process in running]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            tails = [f"-- rank {rank}\n" + log.read_text()[-2500:] for rank, log in enumerate(logs)]
            raise RuntimeError(f"exit codes {codes} ({self.timeout_seconds:.0f} s at most)\n" + "\n".join(tails))
