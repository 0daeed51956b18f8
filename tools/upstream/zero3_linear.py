"""DeepSpeed: ZeRO 3 replaces torch.nn.functional.linear for the whole process, and leaves it replaced.

Title: zero.Init / ZeRO 3 replaces torch.nn.functional.linear globally and never puts it back

With ZeRO 3 `torch.nn.functional.linear` becomes DeepSpeed's `zero3_linear_wrap` when parameters are partitioned
(`partition_parameters.py`), and stays so when the engine is gone. Later models of the process, which have nothing to do
with ZeRO, run through it: results differ in their last bits, and autocast and tracing take another path. Expected: the
function is put back when the last ZeRO 3 engine is destroyed, or is used for partitioned parameters alone.

Run: python zero3_linear.py
"""

import gc
import os
import sys

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in (
    ("RANK", "0"),
    ("LOCAL_RANK", "0"),
    ("WORLD_SIZE", "1"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29871"),
):
    os.environ.setdefault(name, value)

import deepspeed  # noqa: E402


def main() -> int:
    """Whether the function is another one behind a ZeRO 3 engine that was destroyed."""
    before = torch.nn.functional.linear
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init():
        model = torch.nn.Linear(4, 4)
    del model
    gc.collect()
    deepspeed.zero.partition_parameters.shutdown_init_context()
    after = torch.nn.functional.linear
    print(f"torch.nn.functional.linear is {getattr(after, '__module__', '?')}.{after.__name__}")
    torch.distributed.destroy_process_group()
    return int(after is not before)


if __name__ == "__main__":
    sys.exit(main())
