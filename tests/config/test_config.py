import json
from pathlib import Path

import pytest

from omnibal.config import (
    check_deferral,
    check_learning_rates,
    complete_deepspeed_config,
    dtype_of,
    fill_in_steps,
    layout_of,
    read_config,
)
from omnibal.config.section import LearningRates
from omnibal.errors import ConfigError

BF16 = {"bf16": {"enabled": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}


def complete(config, *, num_stages=2, num_replicas=3, schedule="1f1b"):
    if schedule != "1f1b":
        check_deferral(config)
    return complete_deepspeed_config(config, layout_of(config, num_stages, num_replicas))


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json")), ids=lambda p: p.name
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_files_to_copy_are_valid_under_both_schedules(path, schedule):
    deepspeed_config, section = read_config(path)
    complete(deepspeed_config, schedule=schedule)
    assert section.pipeline.num_stages == "auto"


def test_a_file_for_gpus_trains_in_bfloat16_and_sums_in_float32():
    deepspeed_config, _ = read_config(Path(__file__).parents[2] / "ds_configs" / "internvl3-8b-8gpu.json")
    assert dtype_of(deepspeed_config) == "bfloat16"
    assert complete(deepspeed_config, schedule="zero-bubble")["data_types"] == {"grad_accum_dtype": "fp32"}
    given = complete(deepspeed_config | {"data_types": {"grad_accum_dtype": "bf16"}})
    assert given["data_types"] == {"grad_accum_dtype": "bf16"}


def test_section_is_split_from_what_deepspeed_reads(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "omnibal": {"packing": {"llm_tokens": 4096}}}))
    deepspeed_config, section = read_config(path)
    assert deepspeed_config == BF16
    assert section.packing.llm_tokens == 4096
    assert section.pipeline.num_stages == "auto"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"packing": {"llm_token": 1}}, "omnibal.packing.llm_token must be a known key.*did you mean 'llm_tokens'"),
        ({"pipelines": {}}, "omnibal.pipelines must be a known key.*did you mean 'pipeline'"),
        ({"run": {"zzz": 1}}, "known keys are output, epochs"),
        ({"packing": {"llm_tokens": 0}}, "^omnibal.packing.llm_tokens must be greater than or equal to 1, got 0$"),
        (
            {"pipeline": {"recompute": "some"}},
            "^omnibal.pipeline.recompute must be 'none', 'selective' or 'full' or a valid list, got 'some'$",
        ),
        (
            {"pipeline": {"recompute": ["none", "most"]}},
            r"^omnibal.pipeline.recompute\[1\] must be 'none', 'selective' or 'full', got 'most'$",
        ),
        (
            {"pipeline": {"num_stages": 0}, "data": {"workers": -1}},
            "^omnibal.data.workers must be .* to 0, got -1; omnibal.pipeline.num_stages must be .* or 'auto', got 0$",
        ),
        (
            {"pipeline": {"encoder": "spread", "num_tensor": 2}},
            "^omnibal.pipeline.num_tensor must be 1 or 'auto' beside omnibal.pipeline.encoder, got 2$",
        ),
        ({"packing": {"method": "sorted"}}, "omnibal.packing.method.*got 'sorted'"),
        ({"data": {"mixture": {"a": -1}}}, "^omnibal.data.mixture: shares must be at least 0, got a: -1.0$"),
        ({"data": {"mixture": "repeats"}}, "^omnibal.data.mixture must be shares by source, .* got 'repeats'$"),
        (
            {"data": {"mixture": {"shares": {"a": 1}, "schedule": [{"step": 3, "shares": {"a": 1}, "st": 1}]}}},
            r"^omnibal.data.mixture.schedule.0.st must be a known key, got 'st'; did you mean 'step'\?$",
        ),
        ({"model": {"frozen": "vision_block"}}, "^omnibal.model.frozen must be a valid list, got 'vision_block'$"),
        ({"model": {"frozen": [1]}}, r"^omnibal.model.frozen\[0\] must be a valid string, got 1$"),
        (
            {"optimizer": {"learning_rates": {"visoin": 1e-5}}},
            "learning_rates.*did you mean 'vision'",
        ),
        ({"optimizer": {"learning_rates": {"vision": 0}}}, "omnibal.optimizer.learning_rates.vision must be .*got 0"),
        (
            {"optimizer": {"weight_decay": "some"}},
            "omnibal.optimizer.weight_decay must be 'all' or 'matrices', got 'some'",
        ),
        ([], "^omnibal must be an object, got"),
    ],
)
def test_wrong_keys_and_values_are_named(section, message):
    with pytest.raises(ConfigError, match=message):
        read_config({"omnibal": section})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_cliping": 1.0},
            "gradient_cliping of .* left out, got 1.0; did you mean 'gradient_clipping'",
        ),
        ({"lr": 1e-4}, "lr of a ds_config must be left out, got 0.0001; nothing in a pipeline heeds it"),
        ({"seed": 42}, "seed of .* omnibal.packing.seed decides about data"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "omnibal.pipeline.recompute says which layers"),
        ({"pipeline": {"stages": 4}}, "omnibal.pipeline says how the model is cut"),
        ({"gradient_accumulation_dtype": "fp32"}, "data_types.grad_accum_dtype says it"),
        ({"sequence_parallel_size": 2}, "a pack is on one device"),
        ({"gradient_allreduce_op": "sum"}, "averaged over the target tokens"),
        (
            {"bf16": {"enabled": "auto"}},
            "^bf16.enabled of .* must be a value, got 'auto', .* here only gradient_accumulation",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            "^optimizer.params.lr of .* must be a value",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            "^scheduler.params.warmup_max",
        ),
        ({"bf16": {"enabled": "false"}}, "^bf16.enabled of a ds_config must be true or false, got 'false'"),
        ({"optimizer": []}, r"^optimizer of a ds_config must be an object, got \[\]"),
        ({"scheduler": {"type": "WarmupLR", "params": None}}, "^scheduler.params of a ds_config must be an object"),
        ({"timers": {"throughput": True}}, "^timers.throughput of a ds_config must be an object, got True"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, "^checkpoint of .*; omnibal.run says when and how"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, "^datastates_ckpt of .*; omnibal.run says when and how"),
        ({"torch_autocast": {"enabled": True}}, "^torch_autocast of a ds_config must be left out, .*; enable bf16"),
        ({"prescale_gradients": True}, "^prescale_gradients of .*; gradients are averaged over the target tokens"),
    ],
)
def test_what_a_pipeline_would_pass_over_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_config(config)


def test_what_asks_for_nothing_may_stay():
    config = {
        "train_batch_size": "auto",
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "prescale_gradients": False,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    }
    assert read_config(config)[0] == config


def test_a_ds_config_is_a_path_or_its_content():
    with pytest.raises(ConfigError, match="config must be the path or the content of a ds_config, got None"):
        read_config(None)


def test_paths_in_the_home_folder_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    _, section = read_config({"omnibal": {"model": {"path": "~/model"}, "run": {"output": "~/runs/a"}}})
    assert section.model.path == str(tmp_path / "model")
    assert section.run.files.folder == tmp_path / "runs" / "a"


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"ds_config must be a readable file, got .*none\.json"):
        read_config(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{\n"a": 1,\n"b": [')
    with pytest.raises(ConfigError, match=r"broken\.json, line 3"):
        read_config(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_config(broken)


def test_batch_sizes_follow_from_the_pipeline():
    filled = complete(ZERO_1 | {"gradient_accumulation_steps": 4, "train_batch_size": "auto"})
    assert filled["train_micro_batch_size_per_gpu"] == 1
    assert filled["train_batch_size"] == 12


def test_zero_holds_no_buffers_of_gradients_unless_told_to():
    assert complete(ZERO_1)["zero_optimization"] == {"stage": 1, "contiguous_gradients": False}
    told = {"zero_optimization": {"stage": 1, "contiguous_gradients": True}}
    assert complete(told)["zero_optimization"] == told["zero_optimization"]


def test_no_timer_waits_for_the_device_unless_told_to():
    assert complete(ZERO_1)["timers"]["throughput"] == {"synchronized": False}
    told = ZERO_1 | {"timers": {"throughput": {"enabled": True, "synchronized": True}}}
    assert complete(told)["timers"] == told["timers"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ZERO_1 | {"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu must be 1"),
        (ZERO_1 | {"train_batch_size": 7}, "train_batch_size must be 3"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage must be 0 or 1 with a pipeline, got 2"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage must be 0 or 1 with a pipeline, got 3"),
        (
            ZERO_1 | {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device must be none with a pipeline, got 'cpu'",
        ),
        (
            ZERO_1 | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device must be none or cpu with a pipeline, got 'nvme'",
        ),
        (
            {"gradient_clipping": 0, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.stage must be 1 with offload_optimizer, got 0",
        ),
        (
            ZERO_1 | {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype must be one of fp32, float32, float, torch.float32, got 'bf16'",
        ),
        (
            ZERO_1 | {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16_optimizer_states must be false, got true",
        ),
        (ZERO_1 | {"gradient_clipping": None}, "gradient_clipping must be a number of at least 0, got None"),
        (ZERO_1 | {"gradient_clipping": -1.0}, "gradient_clipping must be a number of at least 0, got -1.0"),
        (ZERO_1 | {"wall_clock_breakdown": True}, "steps_per_print must be given with wall_clock_breakdown, got none"),
        ({"gradient_clipping": 0.5}, "gradient_clipping must be 0 with fp32, ZeRO stage 0 and 2 pipeline stages"),
        ({}, r"got none \(DeepSpeed then clips at 1.0\)"),
    ],
)
def test_what_a_pipeline_forbids_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        complete(config)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_float16_is_refused_wherever_a_ds_config_is_read(num_stages, schedule):
    config = ZERO_1 | {"fp16": {"enabled": True}, "gradient_clipping": 0}
    message = "fp16.enabled must be false, got True; enable bf16"
    with pytest.raises(ConfigError, match=message):
        complete(config, num_stages=num_stages, schedule=schedule)
    with pytest.raises(ConfigError, match=message):
        dtype_of(config)


def test_precision_is_what_the_ds_config_enables():
    assert dtype_of({"fp16": {"enabled": False}}) == dtype_of({}) == "float32"
    assert dtype_of(BF16 | {"fp16": {"enabled": False}}) == "bfloat16"


@pytest.mark.parametrize(
    "change",
    [
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"bf16": {"enabled": True, "immediate_grad_update": True}},
    ],
)
@pytest.mark.parametrize("schedule", ["zero-bubble", "zero-bubble-lean"])
def test_what_deferred_gradients_forbid_is_refused(change, schedule):
    complete(ZERO_1 | change)
    with pytest.raises(ConfigError, match=r"\w+\.\w+ must be false under zero-bubble, got true"):
        complete(ZERO_1 | change, schedule=schedule)


@pytest.mark.parametrize(
    "config",
    [
        {"wall_clock_breakdown": True, "steps_per_print": 10},
        {
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "none"},
            }
        },
        BF16 | {"data_types": {"grad_accum_dtype": "torch.bfloat16"}},
    ],
)
def test_what_deepspeed_does_as_it_says_is_left_to_it(config):
    found = complete(ZERO_1 | config)
    for key, value in config.items():
        assert found[key] == value or found[key] == {"contiguous_gradients": False} | value


@pytest.mark.parametrize("config", [ZERO_1, BF16, {"gradient_clipping": 0}])
def test_right_clipping_is_left_as_it_is(config):
    assert complete(config).get("gradient_clipping") == config.get("gradient_clipping")


def test_one_stage_clips_right():
    assert "gradient_clipping" not in complete({}, num_stages=1)


def test_schedule_follows_the_true_number_of_steps():
    parameters = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    filled = complete(ZERO_1 | {"scheduler": {"type": "WarmupCosineLR", "params": parameters}})["scheduler"]["params"]
    fill_in_steps(filled, 200)
    assert filled == {"total_num_steps": 200, "warmup_num_steps": 10, "warmup_type": "linear"}
    assert parameters["total_num_steps"] == "auto"  # the user's own stays as it is


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}, "got WarmupLR with warmup_max_lr"),
        ({"type": "OneCycle", "params": {}}, "got OneCycle with rates of its own"),
    ],
)
def test_a_schedule_that_would_give_all_modules_one_rate_is_refused(scheduler, message):
    check_learning_rates({"scheduler": scheduler}, LearningRates())
    check_learning_rates({"scheduler": {"type": "WarmupLR", "params": {}}}, LearningRates(vision=1e-5))
    with pytest.raises(ConfigError, match=f"learning_rates.vision, {message}"):
        check_learning_rates({"scheduler": scheduler}, LearningRates(vision=1e-5))


def test_folder_plan_and_monitors_follow_from_the_files_name(tmp_path):
    content = {
        "csv_monitor": {"enabled": True},
        "tensorboard": {"enabled": True, "output_path": "mine"},
        "omnibal": {"pipeline": {"plan": "auto"}},
    }
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        config, section = read_config(tmp_path / f"{name}.json")
        assert (section.run.output, section.pipeline.plan) == (f"runs/{name}", f"runs/{name}/plan.json")
        assert config["csv_monitor"] == {"enabled": True, "output_path": f"runs/{name}/monitor", "job_name": name}
        assert config["tensorboard"] == {"enabled": True, "output_path": "mine", "job_name": name}
    named = content | {"omnibal": {"run": {"output": "there"}}}
    (tmp_path / "first.json").write_text(json.dumps(named))
    config, section = read_config(tmp_path / "first.json")
    assert (section.run.output, section.pipeline.plan) == ("there", None)
    assert config["csv_monitor"]["output_path"] == "there/monitor"
    assert read_config(content)[1].run.output == "runs/train"
    assert "csv_monitor" not in read_config({})[0]
