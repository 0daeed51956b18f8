import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from omnibal.cost import CostModel, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import OmnibalError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.clusters import on_cluster
from tests.pipeline.profiles import layer, profile
from tools.emulator.__main__ import app
from tools.emulator.run import Emulation


@pytest.fixture
def emulate():
    """Runs the command."""

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture
def refusal():
    """Why a command is refused."""

    def run(*arguments):
        error = CliRunner().invoke(app, [str(argument) for argument in arguments]).exception
        assert isinstance(error, OmnibalError), error
        return str(error)

    return run


@pytest.fixture
def saved(tmp_path):
    """Writes a plan of two stages and its profile, for so many replicas."""

    def write(num_replicas=1, memory=4 << 30):
        kept = {"none": CostModel(llm_tokens=100), "full": CostModel()}
        layers = [layer(f"block.{number}", forward=number, output=1e9, saved_bytes=kept) for number in (1, 2, 3)]
        profile(layers).save(tmp_path / "profile.json")
        plan = Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3)
        on_cluster(plan, num_replicas, memory).save(tmp_path / "plan.json")
        return (tmp_path / "plan.json",)

    return write


@pytest.fixture
def tasks(monkeypatch):
    """Emulated runs are as predicted; the tasks."""
    seen = []

    def run(task):
        seen.append(task)
        return Emulation(task.predicted, (1 << 30,) * task.plan.num_stages, start_seconds=1.5)

    monkeypatch.setattr("tools.emulator.run.run_emulation", run)
    return seen


def test_steps_are_the_samplers(emulate, saved, tasks, token_lengths):
    memory = (4 << 30, 4 << 30, 5 << 30, 5 << 30)
    options = ("--lengths", token_lengths[0], "--steps", 2, "--json")
    record = json.loads(emulate(*saved(2, memory), *options).stdout)
    lengths = SampleLengths.from_token_lengths([token_lengths[0]])
    sampler = BalancedBatchSampler(lengths, PackLimits(9, 4096), num_replicas=2, rank=0, micro_batches=4)
    steps = (0, sampler.num_steps - 2)  # the last one may be short
    assert tasks[0].steps == tuple(tuple(sampler.step(number).load) for number in steps)
    assert tasks[0].budget_bytes == (4 << 30, 5 << 30)
    assert record["step_seconds"] == record["predicted_seconds"]
    assert record["over_prediction"] == 0
    assert [stage["peak_bytes"] for stage in record["stages"]] == [1 << 30] * 2
    assert sum(replica["times_slowest"] for replica in record["replicas"]) == 2


@pytest.mark.usefixtures("few_steps")
def test_a_ds_config_needs_nothing_more(emulate, ds_config, tasks, tmp_path):
    emulate(ds_config(), "--steps", 1)
    assert tasks[0].plan == Plan.load(tmp_path / "run" / "what-if" / "plan.json")
    emulate(ds_config(pipeline={"recompute": "full"}), "--present", "--steps", 1)
    assert tasks[1].plan.recompute == ("full",) * 13


def test_memory_is_predicted_for_the_largest_packs(emulate, saved, tasks):
    record = json.loads(emulate(*saved(), "--json").stdout)
    plan, largest = tasks[0].plan, Load(9, 4096, 4096**2)
    expected = plan.memory(tasks[0].profile, largest)
    assert [stage["predicted_peak_bytes"] for stage in record["stages"]] == [stage.total for stage in expected]


def test_tables_and_a_picture(emulate, saved, tasks, tmp_path):
    plot = tmp_path / "new" / "timeline.png"
    text = emulate(*saved(3), "--plot", plot).stdout
    assert tasks[0].plan.layout.num_replicas == 3
    assert "+0.0% over the prediction" in text
    assert "waits for the slowest" in text and "at most" in text  # a bound on memory, which packs need not reach
    with Image.open(plot) as picture:
        assert picture.width > picture.height


def test_a_path_that_cannot_be_written_is_refused_before_the_run(refusal, saved, tasks, tmp_path):
    command = saved()
    assert "the folder of --plot must be a folder, got" in refusal(*command, "--plot", command[0] / "timeline")
    assert "--plot must be a file, got the folder" in refusal(*command, "--plot", tmp_path)
    assert not tasks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "timeline.abc"], "--plot must be a PNG, whose name ends in .png, got timeline.abc"),
        (["--profile", "{plan}"], "profile must have the key 'device', got none"),
        (["--cluster", "A100-80GB"], "layout must have at most the 1 devices of A100-80GB, got 2"),
    ],
)
def test_wrong_options_are_refused_before_the_run(refusal, saved, tasks, options, message):
    command = saved()
    assert message in refusal(*command, *(option.format(plan=command[0]) for option in options))
    assert not tasks


def test_what_is_no_plan_is_named(refusal, saved, tmp_path):
    saved()
    line = refusal(tmp_path / "profile.json")
    assert line == f"source must be a ds_config or a plan, got {tmp_path / 'profile.json'}, which is a profile"


def test_more_processes_than_a_machine_starts_are_refused(refusal, saved):
    line = refusal(*saved(1000))
    assert "stages x replicas must be at most 256 processes of one machine, got 2000" in line
