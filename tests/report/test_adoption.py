"""The layout that wins among those that run is the one whose lines are pasted."""

import json
import re

import pytest

from omnibal.advise.estimate import Recipe
from omnibal.advise.layouts import LayoutAnswer, WeighedLayout
from omnibal.advise.measuring import MeasuredLengths
from omnibal.advise.models import Model
from omnibal.advise.present import Present
from omnibal.advise.question import Question
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.config import read_config
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.report.advise import Report
from omnibal.report.layouts import LayoutReport
from tools.synthetic import tiled_lengths

EIGHT = Cluster.parse("8xA100-80GB")
MEASURED = MeasuredLengths(tiled_lengths(2000, seed=1), "all", is_whole=True)


def report_of(present):
    question = Question(MEASURED, Model.known("InternVL3-1B"), EIGHT, present, model_path="models/mine")
    return Report(question, question.answer())


@pytest.fixture(scope="module")
def report():
    return report_of(Present("transformers", "zero3", 4, 2, batching="group_by_length", recompute=False))


def candidate(kind, rate, *, recomputed=0.0, layout=None, encoder=None):
    recompute, plan = "full" if recomputed else "none", None
    recipe = Recipe("zero2", "even", 8, 2, recompute, PackLimits(25, 7000))
    if layout is not None:
        layout = Layout(layout[0], layout[1], num_tensor=layout[2], encoder=encoder)
        plan = Plan(
            PackLimits(9, 3000),
            4,
            Partition((0, 3, 6) if layout.num_stages == 2 else (0, 3, 4, 5, 6)),
            ("none",) * 6,
            layout=layout,
            cluster=EIGHT,
        )
    return WeighedLayout(
        kind=kind, layout="in words", samples_per_second=rate, peak_bytes=1, micro_batches=2, shares={"useful": 1.0},
        plan=plan, recipe=recipe if plan is None else None, recomputed=recomputed,
    )  # fmt: skip


def pasted(report, *found):
    return report.to_paste(LayoutReport(LayoutAnswer(found, {}), report.question.scenario))


def test_even_packs_have_limits_and_what_balance_needs(report):
    lines = pasted(report, candidate("zero", 1e6))
    assert lines[0].startswith("adopt: ZeRO with balanced packs, 1,000,000 samples/s (in words)")
    text = "\n".join(lines)
    assert re.search(r"balance\(trainer, PackLimits\(25, 7000\), samples_per_step=\d+\)", text)
    assert 'train_sampling_strategy="random"' in text and '"zero_optimization": {"stage": 2} in the ds_config' in text


def test_rearranged_samples_are_drawn_in_batches_of_todays_step(report):
    text = "\n".join(pasted(report, candidate("rearranged", 1e6, recomputed=0.25), candidate("zero", 9e5)))
    assert "rearrange(trainer)  # on all ranks" in text and "balance(" not in text
    assert "set: per_device_train_batch_size=8, gradient_accumulation_steps=1, train_sampling" in text
    assert "gradient_checkpointing=True" in text and "today, 64 with them" in text
    assert "docs/rearranging.md" in "\n".join(pasted(report_of(Present("ms-swift", "zero3", 4, 2)),
                                                     candidate("rearranged", 1e6)))  # fmt: skip


def test_the_lines_let_the_share_of_the_layers_recompute(report):
    from transformers.modeling_layers import GradientCheckpointingLayer

    by_balance = pasted(report, candidate("zero", 1e6, recomputed=0.3))
    assert not any("recompute" in line for line in by_balance)
    lines = pasted(report, candidate("rearranged", 1e6, recomputed=0.3), candidate("zero", 9e5))
    start = lines.index("paste, so that some layers recompute:")
    layers = [GradientCheckpointingLayer() for _ in range(20)]

    class Trainer:
        def add_callback(self, callback):
            callback.on_train_begin(None, None, None, model=self)

        def modules(self):
            return [self, *layers]

    exec("\n".join(line[4:] for line in lines[start + 1 :]), {"trainer": Trainer()})
    assert sum(layer.gradient_checkpointing for layer in layers) == 6


@pytest.mark.parametrize(
    ("kind", "layout", "encoder", "keys"),
    [
        ("pipeline", (2, 4, 1), None, {}),
        ("tensor", (2, 2, 2), None, {"num_tensor": 2}),
        ("spread", (2, 4, 1), Encoder.on_all(8), {"encoder": "spread"}),
        ("units", (4, 2, 1), Encoder(1, 2), {"encoder": {"num_stages": 1, "num_replicas": 2}}),
    ],
)
def test_a_pipelines_ds_config_says_its_layout(report, tmp_path, kind, layout, encoder, keys):
    lines = pasted(report, candidate(kind, 1e6, layout=layout, encoder=encoder))
    content = json.loads(lines[2])
    assert keys.items() <= content["omnibal"]["pipeline"].items()
    assert content["omnibal"]["pipeline"].keys() == {"num_stages", "schedule", *keys}
    (tmp_path / "pipeline.json").write_text(lines[2])
    read_config(tmp_path / "pipeline.json")
    assert not any("balance" in line for line in lines)


def test_what_does_not_run_or_is_no_faster_is_not_pasted(report):
    rate = report.advice.after.samples_per_second
    spread = candidate("spread", 1e6, layout=(2, 2, 2), encoder=Encoder.on_all(8))
    lines = pasted(report, spread, candidate("zero", 1.02 * rate))
    assert lines[0] == f"adopt: your trainer as it is, {rate:,.1f} samples/s with these lines; " + (
        f"ZeRO with balanced packs, {1.02 * rate:,.1f} samples/s (in words) is not faster"
    )
    assert lines[1:] == report.to_paste() == pasted(report, spread)


def test_a_runner_up_is_slower_than_the_winner(report):
    weighed = LayoutReport(
        LayoutAnswer((candidate("rearranged", 15.3), candidate("zero", 14.9), candidate("pipeline", 12.0)), {}),
        report.question.scenario,
    )
    lines = weighed.lines()
    assert any(line.startswith("winner: ZeRO with balanced packs, 14.9") for line in lines)
    assert any(line == "equal within 3%: take the simplest, which is the winner; rearranged 15.3" for line in lines)
    assert weighed.runner_up.kind == "pipeline"
    close = LayoutAnswer((candidate("rearranged", 15.3), candidate("zero", 14.9)), {})
    assert LayoutReport(close, report.question.scenario).runner_up is None
