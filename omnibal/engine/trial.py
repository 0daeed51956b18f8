"""One measured trial: a few training steps under the deepspeed launcher, timed on rank 0 and written as JSON.

deepspeed --module omnibal.engine.trial --deepspeed_config config.json --output result.json --steps 3
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from omnibal.engine.distributed import gather
from omnibal.engine.initialize import initialize


def main() -> None:
    """Time the steps that follow one to warm up; every step is timed from barrier to barrier."""
    arguments = _arguments()
    engine, *_ = initialize(config=arguments.deepspeed_config)
    engine.train_batch()
    get_accelerator().reset_peak_memory_stats()
    seconds = []
    for _ in range(arguments.steps):
        dist.barrier()
        started = perf_counter()
        engine.train_batch().item()
        dist.barrier()
        seconds.append(perf_counter() - started)
    peaks = gather((engine.stage_id, get_accelerator().max_memory_allocated() or 0))
    if engine.global_rank == 0:
        by_stage = [max(peak for stage, peak in peaks if stage == wanted) for wanted in range(engine.num_stages)]
        arguments.output.write_text(json.dumps({"step_seconds": seconds, "peak_bytes": by_stage}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser.parse_args()


if __name__ == "__main__":
    main()
