"""DeepSpeed: the gradient norm of a rank that counts no gradient is an error under bfloat16.

Title: BF16_Optimizer.step fails on tensor ranks whose trained parameters are all replicated (stack of an empty list)

`BF16_Optimizer.get_grads_for_norm` leaves out, on every tensor rank but the first, parameters that all of them hold
whole, and copies of tied weights. Where a pipeline stage trains nothing else (norms or biases; the rest is frozen) the
list is empty, and `deepspeed.runtime.utils.get_global_norm_of_tensors` calls `torch.stack([])`: RuntimeError on this
rank, and the others wait in the all-reduce behind it. ZeRO 1 and 2 take 0 in the same place (`get_grad_norm_direct`).
Expected: 0 here, too.

Run: python empty_norm.py. It takes the norm of no gradient.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.runtime.utils import get_global_norm_of_tensors


def main() -> int:
    """Whether the norm of no gradient is an error."""
    try:
        norm = get_global_norm_of_tensors([])
    except (RuntimeError, IndexError) as error:
        print(f"the norm of no gradient fails: {error}")
        return 1
    print(f"the norm of no gradient is {float(norm)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
