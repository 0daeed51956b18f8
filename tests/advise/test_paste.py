import json
from dataclasses import replace

import pytest

from omnibal.advise.changes import advise
from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.models import Model
from omnibal.advise.paste import COMPARE, HOSTS, Proposal, lines_to_paste, pipeline_lines
from omnibal.advise.present import Present, read_present
from omnibal.cluster import Cluster, Layout
from omnibal.config import layout_of, read_config
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.profile.counted import analytic_profile
from tools.synthetic import tiled_lengths

CLUSTER = Cluster.parse("2x8xA100-80GB")
PROFILE = analytic_profile(Model.known("InternVL3-8B").records, CLUSTER.device)
NAMES = {"data": "train.json", "model": "models/mine"}
LIMITS = PackLimits(16, 4608)


@pytest.fixture(scope="module")
def advice():
    return advise(Scenario(tiled_lengths(1000, seed=1), PROFILE, CLUSTER, 256), Recipe("zero3", "random", 4, 4))


@pytest.mark.parametrize(
    ("host", "packs", "settings"),
    [
        (None, "balance(trainer)", "gradient_checkpointing=False"),
        ("ms-swift", "OMNIBAL_LIMITS=16,4608 swift sft ... --padding_free true",
         "--gradient_accumulation_steps {}, --gradient_checkpointing false"),
        ("llama-factory", "OMNIBAL_LIMITS=16,4608 torchrun --nproc-per-node 8 -m omnibal.integrations.plugins.llama",
         "gradient_accumulation_steps: {}, disable_gradient_checkpointing: true"),
        ("deepspeed", "loader = balanced_loader(dataset, collate, PackLimits(16, 4608), model=model, micro_batches={})",
         '"gradient_accumulation_steps": {}'),
    ],
)  # fmt: skip
def test_each_host_gets_its_own_lines(advice, host, packs, settings):
    proposal = Proposal(LIMITS, 250.2, 0.0)
    lines = lines_to_paste(advice, Present(host=host), CLUSTER, proposal, **NAMES, kind="annotations")
    count = advice.after.recipe.micro_batches
    assert packs.format(count) in "\n".join(lines[1:4])
    assert f"set: {settings.format(count)}" in "\n".join(lines)
    told = "30 steps without and with these lines" if host else "measure it"
    (measured,) = (number for number, line in enumerate(lines) if told in line)
    told = "; samples a step: 256 today, 250 with the" if host else "(256 samples a step today, 250 with packs)"
    assert told in lines[measured]
    asked = f"--limits 16,4608 --num-replicas 16 --micro-batches {count}"
    tried = "optional, plans packs of all samples: omnibal lengths train.json lengths"
    command = f"{tried} --model models/mine {asked}"
    assert lines.index(command) == len(lines) - (1 if host else 4)
    assert host or [line.strip() for line in lines[-2:]] == [*COMPARE]


def test_limits_are_pasted_where_packs_are_of_another_size_than_batches(advice):
    found = replace(advice, after=advice.today.scenario.estimate(replace(advice.after.recipe, batch=8)))
    lines = lines_to_paste(found, Present(), CLUSTER, Proposal(LIMITS, 250.2, 0.0), **NAMES, kind="annotations")
    assert "    balance(trainer, PackLimits(16, 4608), samples_per_step=250)  # before trainer.train()" in lines


def test_what_is_pasted_exists():
    from omnibal.integrations import loops, plugins, transformers

    assert all(hasattr(loops, name) for name in ("balanced_loader", "pack_loss"))
    assert all(hasattr(transformers, name) for name in ("balance", "balance_stream", "rearrange", "compare"))
    folder = plugins.__path__[0]
    text = " ".join(line for host in HOSTS.values() for line in host.packs)
    for name in ("ms_swift", "llama_factory"):
        assert name in text
        with open(f"{folder}/{name}.py") as file:  # noqa: PTH123
            assert "given_limits" in file.read()


def test_nothing_is_pasted_where_all_stays():
    alike = SampleLengths([3] * 50, [1000] * 50)
    advice = advise(Scenario(alike, PROFILE, CLUSTER, 256), Recipe("zero3", "random", 4, 4, "none"))
    assert lines_to_paste(advice, Present(), CLUSTER, None, **NAMES, kind="lengths") == []


@pytest.mark.parametrize(("present", "key"), [(Present(lora=8), "lora"), (Present(frozen=("vision",)), "frozen")])
def test_the_pipelines_ds_config_can_be_read(tmp_path, present, key):
    plan = Plan(LIMITS, 24, Partition((0, 30, 59)), ("none",) * 59, layout=Layout(2, 8), cluster=CLUSTER)
    header, config, *commands = pipeline_lines(plan, present, **NAMES)
    path = tmp_path / "pipeline.json"
    path.write_text(config)
    content, section = read_config(path)
    assert "pipeline.json" in header
    assert content["gradient_accumulation_steps"] == 24
    assert (section.model.path, section.data.train) == ("models/mine", "train.json")
    assert section.cluster == CLUSTER
    assert json.loads(config)["omnibal"]["model"][key]
    assert layout_of(content, section.pipeline.num_stages, 8).num_devices == 16
    assert "omnibal plan pipeline.json --measure --trials 3 --write" in commands[0]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"group_by_length": True}, 'train_sampling_strategy="random" (before transformers 5 group_by_length=False)'),
        ({"train_sampling_strategy": "batch_rebalance"}, 'train_sampling_strategy="random"'),
        ({"finetuning_type": "full", "group_by_length": True}, "group_by_length: false"),
        ({"train_type": "full", "group_by_length": True}, "--group_by_length false"),
    ],
)
def test_what_packs_take_the_place_of_is_switched_off(content, wanted):
    present = read_present({"per_device_train_batch_size": 4, "learning_rate": 1, **content})
    today = Recipe("zero3", present.batching, 4, 1)
    advice = advise(Scenario(tiled_lengths(1000, seed=1), PROFILE, CLUSTER, 64), today, must_fit=False)
    assert advice.takes_packs
    proposal = Proposal(LIMITS, 64, 0.0)
    lines = lines_to_paste(advice, present, CLUSTER, proposal, **NAMES, kind="annotations")
    settings = next(line for line in lines if line.startswith("set: "))
    assert wanted in settings
    if present.host == "transformers":  # Trainer's default takes images away, which `balance` refuses
        assert "remove_unused_columns=False" in settings
