"""``balance(trainer, compile=True)``: blocks that are compiled train what the others train."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from omnibal.errors import ConfigError
from omnibal.integrations.trainer import kernels
from omnibal.integrations.transformers import balance
from omnibal.packs.blocks import compile_blocks
from tests.engine.launch import launch
from tests.integrations import test_trainer
from tests.integrations.test_trainer import COMPILED
from tests.integrations.trainers import LIMITS, Case, Items, accelerate_afresh, trainer_of, weights_of

RECOMPUTES = {"gradient_checkpointing": True}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    # tests/packs/test_blocks.py compiles what runs backward, too
    monkeypatch.setattr(kernels, "compile_blocks", partial(compile_blocks, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "case",
    [
        Case("internvl", recompute={"vision": "none"}, options=RECOMPUTES),
        pytest.param(Case("qwen2_5_vl", lora=True), marks=pytest.mark.slow),
    ],
    ids=["internvl", "qwen2_5_vl"],
)
def test_compiled_blocks_train_the_same(case, tmp_path, capsys):
    trained, told = [], []
    for compiled in (True, False):
        options = {"eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1, "logging_strategy": "steps"}
        options |= {"eval_dataset": Items(case.family, 3), "max_steps": 5}
        trainer = trainer_of(case, tmp_path / str(compiled), **options)
        balance(trainer, LIMITS[case.family], samples_per_step=3, recompute=case.recompute, compile=compiled)
        trainer.train()
        logged = trainer.state.log_history
        losses = [entry[name] for entry in logged for name in ("loss", "eval_loss") if name in entry]
        trained.append((losses, weights_of(trainer.model)))
        told.append(capsys.readouterr().out)
        assert not any("forward" in vars(block) for block in trainer.model.modules())
    (losses, weights), (plain_losses, plain_weights) = trained
    assert losses == plain_losses and len(losses) == 5 + 3
    assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)
    assert 1 <= counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]
    line = "omnibal: attention of packs: a product for each sample (cpu, 32 bits: no kernel for packs); "
    assert f"{line}the head works on target rows; 2 " in told[0] and f"{line}the head works on target rows\n" in told[1]
    assert "DecoderLayer compiled" in told[0] and "compiled" not in told[1]


@pytest.mark.parametrize(
    ("case", "options", "match"),
    [
        (Case("internvl", options=COMPILED), {}, "torch_compile must be left out beside compile=True; it compiles the"),
        (Case("internvl"), {"padded": True}, "padded must be left out beside compile=True"),
    ],
)
def test_what_cannot_be_compiled_block_by_block_is_refused(case, options, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        balance(trainer_of(case, tmp_path), LIMITS["internvl"], compile=True, **options)


def test_zero_3_leaves_nothing_to_compile(tmp_path, monkeypatch):
    monkeypatch.setattr("omnibal.integrations.trainer.settings.sharding_of", lambda trainer: "zero3")
    with pytest.raises(ConfigError, match="ZeRO 3 must be left out beside compile=True; its hooks"):
        balance(trainer_of("internvl", tmp_path), LIMITS["internvl"], compile=True)


def train_on_ranks(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
        patched.setattr(test_trainer, "balance", partial(balance, compile=True))
        for layout in ("fsdp", "zero2", "tp"):
            with accelerate_afresh():
                test_trainer.check_exact(Case("internvl", layout, options=RECOMPUTES), folder / layout)
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_blocks_train_the_same_on_ranks_that_share_weights(tmp_path):
    found = launch(2, "tests.integrations.test_trainer_compiled:train_on_ranks", tmp_path)
    assert all(6 <= graphs <= 12 and breaks == 0 for graphs, breaks in found)
