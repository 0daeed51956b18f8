"""Jobs that end as they are asked to."""

import os
import time

import torch


def answers(job):
    if job == "ends":
        os._exit(3)
    if job == "hangs":
        time.sleep(600)
    if job == "full":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    yield {"answer": job}
    if job == "fails":
        raise ValueError("no such kernel")
