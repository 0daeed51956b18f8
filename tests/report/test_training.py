import json

import pytest
from rich.console import Console

from omnibal.errors import DataError
from omnibal.report.metrics import MetricsLog, read_metrics
from omnibal.report.training import plot_training, training_table

BALANCE = {"vision": 0.5, "llm": 0.75}


def logged(path, steps, *, first_step=0):
    log = MetricsLog(path, first_step=first_step)
    for step in range(first_step + 1, steps + 1):
        line = log.training_step(
            step,
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
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    console.print(training_table(metrics, {"model": tmp_path / "model"}))
    text = console.export_text()
    assert "4.000 → 2.083" in text
    assert "4.0 samples/s, 300 LLM tokens/s" in text
    assert "25.0% of 40" in text
    assert "balance, vision" in text
    plot_training(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
