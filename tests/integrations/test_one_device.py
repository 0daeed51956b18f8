"""Drop-ins whose ranks share one device over NCCL: what other files check on a CPU, case by case."""

import os
import re
from importlib import import_module

import pytest

from tests.engine.launch import launch
from tests.integrations.test_trainer import CASES, MORE_CASES, PAIRED, RESUMED
from tests.integrations.test_trainer_rearranging import SLOW_CASES, Endless
from tests.integrations.test_trainer_streams import Unlike
from tests.integrations.trainers import Case, accelerate_afresh

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("OMNIBAL_RANKS_ON" not in os.environ, reason="test_trainer*.py check these cases on a CPU"),
]

FSDP, ZERO_3, ZERO_2, DDP = (Case("internvl", layout) for layout in ("fsdp", "zero3", "zero2", "ddp"))
EXACT = [
    *(("", case, {}) for case in (FSDP, ZERO_3, ZERO_2, DDP)),
    ("_rearranging", DDP, {}),
    ("_rearranging", Case("qwen3_vl", "zero3", lora=True), {}),
    ("_streams", DDP, {}),
]
MORE_EXACT = [
    *(("_rearranging", case, {}) for case in SLOW_CASES[:2]),
    *(("_streams", Case("qwen2_5_vl", layout), {"stream": Unlike}) for layout in ("zero3", "fsdp")),
    *(("", case, {}) for case in (*CASES, *MORE_CASES) if case not in (FSDP, DDP)),
]
CHECKS = [
    *((file, "exact", {"case": case, **more}) for file, case, more in EXACT),
    *(("", "pairs", {"family": family, "layout": layout}) for family, layout in PAIRED),
    *(("", "epochs_and_resume", {"case": case}) for case in (FSDP, RESUMED[-1], DDP)),
    ("_rearranging", "resumes", {"case": ZERO_2}),
    ("_rearranging", "resumes", {"case": DDP, "stream": Endless}),
    *((file, "mixture", {"case": DDP}) for file in ("_streams", "")),
    *(("", kind, {}) for kind in ("muon", "unlike_data")),
]
MORE_CHECKS = [(file, "exact", {"case": case, **more}) for file, case, more in MORE_EXACT]
"""Of a check the end of its file's name, its name, its arguments."""


def name_of(check):
    file, kind, arguments = check
    parts = [file.strip("_") or "packs", kind]
    for value in arguments.values():
        others = vars(value).items() if isinstance(value, Case) else ()
        own = [str(each) for name, each in others if each != getattr(Case, name, {}) or name == "layout"]
        parts += own or [getattr(value, "__name__", str(value))]
    return re.sub(r"[^\w]+", "-", " ".join(parts))[:90]


def run(file, kind, arguments, folder):
    """On each process."""
    module = import_module(f"tests.integrations.test_trainer{file}")
    with getattr(module, "noting", accelerate_afresh)():
        getattr(module, f"check_{kind}")(**arguments, folder=folder)
    return True


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.cluster(turn), id=name_of(check))
        for turn, checks in ((1, CHECKS), (3, MORE_CHECKS))
        for check in checks
    ],
)
def test_ranks_on_one_device_train_what_plain_transformers_would(check, tmp_path):
    assert launch(2, f"{__name__}:run", *check, tmp_path) == [True, True]
