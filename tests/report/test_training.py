import json
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from matplotlib.figure import Figure

from omnibal.data.limits import PackLimits
from omnibal.errors import DataError
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.report import training
from omnibal.report.training import (
    MetricsLog,
    peak_text,
    plot_shares,
    plot_training,
    read_metrics,
    training_rows,
    training_table,
)
from tests.report.printed import text_of

MIB = 2**20
PLAN = Plan(PackLimits(9, 4096), 2, Partition((0, 1, 2)), ("none", "none"))
BALANCE = {"vision": 0.5, "llm": 0.75}


def logged(path, steps, *, first_step=0):
    log = MetricsLog(path, first_step=first_step)
    for step in range(first_step + 1, steps + 1):
        line = log.training_step(
            step=step,
            epoch=step // 4,
            loss=4 / step,
            learning_rate=0.1,
            seconds=2.0,
            samples=8,
            llm_tokens=600,
            balance=BALANCE,
        )
    log.evaluation(steps, loss=0.5, accuracy=0.25, samples=40)
    return line


def test_the_line_of_a_step(tmp_path):
    line = logged(tmp_path / "metrics.jsonl", 1)
    assert line == "loss 4.000, 4.0 samples/s, 300 tokens/s, balance vision 0.50 llm 0.75"


def test_what_is_logged_is_read(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    logged(path, 3)
    metrics = read_metrics(path)
    assert [record["loss"] for record in metrics.steps] == [4, 2, pytest.approx(4 / 3)]
    assert metrics.evaluations == [{"step": 3, "held_out_loss": 0.5, "held_out_accuracy": 0.25, "held_out_samples": 40}]


def test_waits_for_data_are_in_the_report(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, first_step=0)
    figures = {"epoch": 0, "learning_rate": 0.1, "seconds": 2.0, "samples": 8, "llm_tokens": 600, "balance": BALANCE}
    for step, wait in enumerate((0.5, 0.0, 0.1), 1):
        log.training_step(step=step, loss=2.0, data_seconds=wait, **figures)
    assert training_rows(read_metrics(path))["waits for data"] == "10.0% of the time, most in step 1: 500.0 ms"
    log.training_step(step=4, loss=2.0, **figures)
    assert "waits for data" not in training_rows(read_metrics(path)), "older logs say nothing of waits"


def test_a_step_that_is_not_finite_stays_out_of_means(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", first_step=0)
    figures = {"epoch": 0, "learning_rate": 0.1, "seconds": 2.0, "samples": 8, "llm_tokens": 600, "balance": BALANCE}
    lines = [
        log.training_step(step=step, loss=loss, **figures) for step, loss in enumerate((nan, 3.0, inf, 2.0, 1.0), 1)
    ]
    assert [line.split(",")[0] for line in lines] == [
        "loss nan",
        "loss 3.000",
        "loss 3.000",
        "loss 2.900",
        "loss 2.710",
    ]
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert training_rows(metrics)["loss"] == "nan → 2.000 (mean of the last steps)"
    plot_training(metrics, tmp_path / "loss.png")


def test_the_loss_has_numbers_at_its_axis(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: drawn.append(figure))
    logged(tmp_path / "metrics.jsonl", 30)
    plot_training(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "loss.png")
    loss, *_ = drawn[0].axes
    drawn[0].draw_without_rendering()
    labels = [label.get_text() for which in ("major", "minor") for label in loss.get_yticklabels(which=which)]
    assert [float(label) for label in labels if label]


def test_samples_over_the_limits_of_a_stream_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 2)
    log = MetricsLog(path, first_step=2)
    figures = {"epoch": 0, "learning_rate": 0.1, "seconds": 2.0, "samples": 8, "llm_tokens": 600, "balance": BALANCE}
    assert "over the limits" not in training_rows(read_metrics(path))
    for fate, words in (("drop", "1,200 samples, left out"), ("alone", "1,200 samples, each in a pack of its own")):
        log.training_step(step=3, loss=2.0, oversized={fate: 1200}, left_out=2, **figures)
        assert training_rows(read_metrics(path))["over the limits"] == words
    assert training_rows(read_metrics(path))["left out"] == "4 times a sample that cannot be read; the log names each"


def test_shares_of_sources_that_change_and_have_odd_names_are_drawn(tmp_path, monkeypatch):
    names = ["$\\alpah$", "_hidden", "x" * 1000, "two\nlines"]
    shares = [{names[0]: (0.5, 0.4), names[1]: (0.5, 0.6)}] * 3 + [{name: (0.25, 0.2) for name in names}] * 3
    shares += [{names[3]: (1.0, 1.0)}] * 3
    drawn = []
    monkeypatch.setattr(training, "legend_below", lambda figure, axes: drawn.append(axes))
    plot_shares([*range(1, 10)], shares, tmp_path / "shares.png")
    lines = drawn[0].get_legend_handles_labels()[0]
    assert [line.get_label() for line in lines] == ["$\\alpah$", " _hidden", "x" * 40 + "…", "two lines"]
    first, *_, last = (line.get_ydata() for line in lines)
    assert first.tolist()[:3] == [40] * 3 and first[5] == pytest.approx(30)  # the mean of the steps so far
    assert np.isnan(first[6:]).all()
    assert np.isnan(last[:3]).all()
    assert last.tolist()[3:6] == [20] * 3 and last[8] == pytest.approx(60)
    monkeypatch.undo()
    plot_shares([*range(1, 10)], shares, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 0


def test_a_resumed_run_drops_what_it_trains_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 6)
    logged(path, 5, first_step=4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 5]


def test_a_half_written_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 2)
    path.write_text(path.read_text() + '{"step": 2, "lo')
    logged(path, 3, first_step=2)
    assert [record["step"] for record in read_metrics(path).steps] == [1, 2, 3]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 2)
    path.write_text(path.read_text()[:-30])
    assert [record["step"] for record in read_metrics(path).steps] == [1, 2]
    assert read_metrics(path).evaluations == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "line 4: line must be as a run logs it, got: Invalid JSON"),
        ('{"step": 1, "loss": 2.0}', "line 4: epoch must be as a run logs it, got: Field required"),
        ('{"step": 1, "held_out_loss": "much"}', "line 4: held_out_loss must be as a run logs it"),
    ],
)
def test_what_no_run_logs_is_refused_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    logged(path, 2)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=f"metrics.jsonl, {message}"):
        read_metrics(path)


def test_table_and_plot(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(path, 4)
    metrics = read_metrics(path)
    text = text_of(training_table(metrics, {"model": tmp_path / "model"}), width=120)
    assert "4.000 → 2.083" in text
    assert "4.0 samples/s, 300 LLM tokens/s" in text
    assert "25.0% of 40" in text
    assert "balance, vision" in text and "mean load of a step's packs over the largest" in " ".join(text.split())
    assert "step │ 2.000 s, 10 % … 90 %" in " ".join(text.split())
    assert metrics.devices == "devices that its log does not name"


def test_a_log_names_the_devices_of_a_run_that_went_on_elsewhere(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first_step, device in ((0, "x86_64 CPU, 1 threads"), (1, "A100")):
        log = MetricsLog(path, first_step=first_step, device=device)
        for step in (first_step + 1, first_step + 2):
            log.training_step(
                step=step, epoch=0, loss=1.0, learning_rate=0.1, seconds=4e-5, samples=8, llm_tokens=60, balance=BALANCE
            )
    metrics = read_metrics(path)
    assert ["device" in record for record in metrics.steps] == [True, True, False]
    assert training_rows(metrics)["device"] == metrics.devices == "x86_64 CPU, 1 threads and A100"
    assert training_rows(metrics)["step"] == "0.04 ms, 10 % … 90 %: 0.04 ms … 0.04 ms"
    plot_training(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def stage(size):
    """Of so many bytes and as many of overhead, which is no part of what is compared."""
    terms = ("parameters", "gradients", "optimizer", "pending", "buffers", "transient", "logits")
    memory = StageMemory(**dict.fromkeys(terms, 0), activations=size, overhead=size)
    times = ("forward_seconds", "backward_seconds", "recompute_seconds", "idle_ratio")
    return StagePrediction(**dict.fromkeys(times, 0.0), pending_bytes=0, memory=memory)


def test_a_measured_peak_stands_beside_the_predicted_one():
    plan = replace(PLAN, predicted=Prediction(1.0, 8.0, 0.0, (stage(200 * MIB), stage(4096 * MIB))))
    assert peak_text((150 * MIB, 4300 * MIB), (0, 0), plan).splitlines() == [
        "stage 0: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs",
        "stage 1: memory peak 4.20 GiB, 105.0% of the 4.00 GiB predicted for the largest packs",
    ]


def test_a_peak_that_nobody_predicted_is_said_all_the_same():
    assert peak_text((150 * MIB, MIB), (0, 0), PLAN).splitlines() == [
        "stage 0: memory peak 150.00 MiB; nothing predicted",
        "stage 1: memory peak 1.00 MiB; nothing predicted",
    ]


def test_what_a_device_held_beside_the_model_stands_beside_what_was_planned_for_it():
    plan = replace(PLAN, predicted=Prediction(1.0, 8.0, 0.0, (stage(200 * MIB), stage(200 * MIB))))
    first, second = peak_text((150 * MIB, 150 * MIB), (1536 * MIB, 0), plan).splitlines()
    assert first == (
        "stage 0: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs; 1.50 GiB beside the "
        "model, 200.00 MiB planned (overhead_bytes of the cluster)"
    )
    assert second == "stage 1: memory peak 150.00 MiB, 75.0% of the 200.00 MiB predicted for the largest packs"
    unplanned, _ = peak_text((150 * MIB, MIB), (1536 * MIB, 0), PLAN).splitlines()
    assert unplanned == "stage 0: memory peak 150.00 MiB; nothing predicted; 1.50 GiB beside the model"
