"""The engine on CUDA devices, against the same on a CPU; two ranks talk over NCCL, on one device if need be."""

import pytest
import torch

from omnibal.pipeline.schedule import SCHEDULES
from omnibal.trials import read_missing, write_missing
from tests.engine.launch import launch
from tests.engine.small import NUM_LAYERS, Case, save_small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLIPPED = {"gradient_clipping": 1.0}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **CLIPPED}


def cases(folder, boundaries, *, schedules=("1f1b",)):
    """In float32, in bfloat16 with recomputation; a pack without a picture is among the first replica's."""
    packs = [[[0, 2], [1, 4], [3, 5], [6, 7]]]
    for schedule in schedules:
        yield Case(boundaries, packs, str(folder), zero_stage=1, steps=2, extra=CLIPPED, schedule=schedule)
        yield Case(
            boundaries, packs, str(folder), ("none", "selective", "full"), zero_stage=1, steps=2, extra=BF16,
            schedule=schedule,
        )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_small_model(path)
    return path


def assert_alike(found, expected):
    for on_gpu, on_cpu in zip(found, expected, strict=True):
        assert on_gpu["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)
        assert on_gpu["norms"] == pytest.approx(on_cpu["norms"], rel=0.1)


def test_one_device_trains_as_a_cpu_does(folder):
    whole = list(cases(folder, (0, NUM_LAYERS)))
    (found,) = launch(1, "tests.engine.cases:several_steps", whole, accelerator="cuda")
    (expected,) = launch(1, "tests.engine.cases:several_steps", whole, accelerator="cpu")
    assert_alike(found, expected)


def test_two_ranks_train_as_two_processes_on_a_cpu_under_every_schedule(folder):
    cut = list(cases(folder, (0, NUM_LAYERS // 2, NUM_LAYERS), schedules=SCHEDULES))
    found = launch(2, "tests.engine.cases:several_steps", cut, accelerator="cuda")
    expected = launch(2, "tests.engine.cases:several_steps", cut, accelerator="cpu")
    for of_rank, on_cpu in zip(found, expected, strict=True):
        assert_alike(of_rank, on_cpu)


def test_two_replicas_of_which_one_has_no_picture(folder):
    packs = [[[1, 4], [1, 7]], [[0, 2], [3, 5]]]
    lean = [Case((0, NUM_LAYERS), packs, str(folder), zero_stage=1, steps=2, extra=BF16)]
    found = launch(2, "tests.engine.cases:several_steps", lean, accelerator="cuda")
    expected = launch(2, "tests.engine.cases:several_steps", lean, accelerator="cpu")
    for of_rank, on_cpu in zip(found, expected, strict=True):
        assert_alike(of_rank, on_cpu)


def test_the_allocators_message_says_by_how_much_memory_was_short(tmp_path):
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    write_missing(tmp_path, 0, 0, str(raised.value))
    (missing,) = read_missing(tmp_path, 1)
    assert total - 2**30 <= missing <= 2 * total
