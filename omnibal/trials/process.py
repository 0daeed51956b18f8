"""One measured trial: a few training steps under the deepspeed launcher, timed on rank 0 and written as JSON.

deepspeed --module omnibal.trials.process --deepspeed_config config.json --output result.json --steps 3
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

from omnibal.engine.launch import let_segments_grow

let_segments_grow()

import torch
import torch.distributed as dist

from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import initialize
from omnibal.trials.run import write_missing


def main() -> None:
    """Time the steps that follow one to warm up, from barrier to barrier, and measure the memory of one more."""
    arguments = _arguments()
    engine, *_ = initialize(config=arguments.deepspeed_config)
    try:
        seconds, peak_bytes = measure(engine, arguments.steps)
    except torch.OutOfMemoryError as error:
        write_missing(arguments.output.parent, engine.stage_id, engine.global_rank, str(error))
        raise
    if engine.global_rank == 0:
        arguments.output.write_text(json.dumps({"step_seconds": seconds, "peak_bytes": peak_bytes}))


def measure(engine: OmnibalEngine, steps: int) -> tuple[list[float], tuple[int, ...]]:
    """Seconds of some steps, and the most bytes that a device of each stage held in another one."""
    engine.train_batch()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        started = perf_counter()
        engine.train_batch().item()
        dist.barrier()
        seconds.append(perf_counter() - started)
    return seconds, engine.measured_batch()[1].step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser.parse_args()


if __name__ == "__main__":
    main()
