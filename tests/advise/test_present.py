import pytest

from omnibal.advise.measuring import MeasuredLengths
from omnibal.advise.models import Model
from omnibal.advise.present import Overlong, Present, read_present
from omnibal.advise.question import Question
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError

EIGHT = Cluster.parse("8xA100-80GB")
ZERO_2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


def said(content, **files):
    present = read_present(content, files.__getitem__)
    return {
        name: value for name, value in vars(present).items() if name not in ("said", "unread") and value is not None
    }


def asked(present):
    return Question(MeasuredLengths(SampleLengths([1], [400]), "one"), Model.known("InternVL3-1B"), EIGHT, present)


def test_a_ds_config():
    assert said({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 8}) == {
        "host": "deepspeed", "sharding": "zero3", "accumulation": 8,
    }  # fmt: skip
    assert said({"bf16": {"enabled": True}})["sharding"] == "ddp"


def test_a_ds_config_of_a_trainer_is_told_by_what_it_leaves_to_it():
    found = said({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"})
    assert found == {"host": "transformers", "sharding": "zero3"}


def test_what_a_ds_config_leaves_out_follows_as_in_deepspeed():
    zero = {"zero_optimization": {"stage": 1}}
    assert said({**zero, "train_micro_batch_size_per_gpu": 4})["accumulation"] == 1
    assert "accumulation" not in said({**zero, "train_micro_batch_size_per_gpu": 4, "train_batch_size": 64})
    for given, batches in (
        ({"train_batch_size": 64}, (8, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (4, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, (2, 8)),
    ):
        recipe = asked(read_present({**zero, **given})).recipe
        assert (recipe.batch, recipe.micro_batches) == batches
    with pytest.raises(ConfigError, match="train_batch_size must be a multiple of 8 devices times 3, got 64"):
        asked(read_present({**zero, "train_batch_size": 64, "gradient_accumulation_steps": 3})).recipe  # noqa: B018


def test_what_the_host_holds_needs_no_memory_on_the_devices():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    with_offload, without = (asked(read_present({"zero_optimization": each})) for each in (zero, {"stage": 3}))
    held, all_held = (
        question.scenario.estimate(question.recipe).memory.state_bytes for question in (with_offload, without)
    )
    trained = sum(layer.optimizer_bytes + layer.gradient_bytes for layer in without.scenario.profile.layers)
    assert all_held - held == pytest.approx(trained / 8, rel=1e-6)
    assert with_offload.present.said["offload_optimizer"] == "yes"
    assert said({"train_type": "full", "deepspeed": "zero3_offload"})["offloaded"] == ("optimizer", "parameters")
    assert said({"train_type": "full", "deepspeed": "zero2_offload"})["offloaded"] == ("optimizer",)


def test_training_arguments_have_transformers_defaults():
    assert said({"learning_rate": 1e-5}) == {
        "host": "transformers", "sharding": "ddp", "batch": 8, "accumulation": 1, "batching": "random",
        "recompute": False, "pure": True,
    }  # fmt: skip
    found = said({"per_device_train_batch_size": 2, "gradient_checkpointing": False, "deepspeed": ZERO_2})
    assert (found["sharding"], found["batch"], found["recompute"]) == ("zero2", 2, False)
    assert said({"learning_rate": 1, "activation_checkpointing": True})["recompute"] is True
    assert said({"learning_rate": 1, "fsdp": "full_shard auto_wrap"})["sharding"] == "fsdp"
    for strategy in ("group_by_length", "batch_rebalance"):
        assert said({"learning_rate": 1, "train_sampling_strategy": strategy})["batching"] == strategy


def test_llama_factory_freezes_and_recomputes_unless_told():
    found = said(
        {"finetuning_type": "lora", "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "deepspeed": "z.json",
         "per_device_train_batch_size": 4},
        **{"z.json": ZERO_2},
    )  # fmt: skip
    assert found == {
        "host": "llama-factory", "sharding": "zero2", "batch": 4, "accumulation": 1, "batching": "random",
        "cutoff": 2048, "recompute": True, "frozen": ("vision", "projector"), "lora": 8, "max_pixels": 768 * 768,
        "model": "Qwen/Qwen2.5-VL-7B-Instruct", "overlong": Overlong("cutoff_len", "question and answer"),
    }  # fmt: skip
    full = said({"finetuning_type": "full", "freeze_vision_tower": False, "neat_packing": True, "cutoff_len": 8192,
                 "disable_gradient_checkpointing": True})  # fmt: skip
    assert full["frozen"] == ("projector",)
    assert (full["batching"], full["cutoff"], full["recompute"]) == ("packed", 8192, False)
    assert "lora" not in full


def test_ms_swift_names_deepspeeds_stages():
    found = said({"train_type": "lora", "lora_rank": 16, "deepspeed": "zero3_offload", "padding_free": True})
    assert found == {
        "host": "ms-swift", "sharding": "zero3", "batch": 1, "accumulation": 1, "batching": "flattened",
        "recompute": True, "frozen": ("vision", "projector"), "lora": 16, "offloaded": ("optimizer", "parameters"),
        "pure": True, "overlong": Overlong("truncation_strategy delete", "nothing"),
    }  # fmt: skip


def test_what_is_said_on_the_command_line_goes_first():
    present = Present(batch=2, lora=0).over(read_present({"zero_optimization": {"stage": 1}, "bf16": {}}))
    assert (present.sharding, present.batch, present.lora) == ("zero1", 2, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"loss": 1}, "today must be a trainer .* got one with the keys loss"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"learning_rate": 1, "per_device_train_batch_size": 0}, "per_device_train_batch_size must be a positive"),
    ],
)
def test_wrong_values_are_named(content, message):
    with pytest.raises(ConfigError, match=message):
        read_present(content)


def bytes_kept(content, sharding="zero2", **files):
    return read_present(content, files.__getitem__).precision.kept(sharding)


def test_what_a_trained_parameter_takes_is_read():
    zero = {"zero_optimization": {"stage": 2}}
    assert bytes_kept(zero) == (8, 4)
    assert bytes_kept({**zero, "optimizer": {"type": "Lion"}}) == (4, 4)
    assert bytes_kept({**zero, "optimizer": {"type": "Muon"}}) == (4, 4)
    assert read_present({**zero, "optimizer": {"type": "Muon"}}).precision.kept("zero2", "head") == (8, 4)
    pure = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert bytes_kept({**zero, **pure}) == (4, 0)
    arguments = {"learning_rate": 1e-5, "bf16": True}
    assert bytes_kept(arguments, "ddp") == (4, 0)  # as transformers loads weights, AdamW has 16-bit states
    assert bytes_kept(arguments, "zero2") == (8, 4)
    assert bytes_kept({**arguments, "dtype": "float32"}, "ddp") == (8, 4)
    assert bytes_kept({**arguments, "optim": "adamw_bnb_8bit"}, "ddp") == (pytest.approx(2.03, abs=0.01), 0)
    assert bytes_kept({**arguments, "optim": "paged_adamw_8bit"}, "ddp") == (0, 0)
    assert bytes_kept({**arguments, "optim": "adafactor"}, "zero3") == (0, 4)
    assert bytes_kept({**arguments, "optim": "sgd", "deepspeed": "z.json"}, **{"z.json": ZERO_2}) == (0, 4)
    own = {**ZERO_2, "optimizer": {"type": "AdamW"}}
    assert bytes_kept({**arguments, "optim": "sgd", "deepspeed": "z.json"}, **{"z.json": own}) == (8, 4)
    factory = {"finetuning_type": "full", "cutoff_len": 2048}
    assert bytes_kept(factory, "ddp") == (8, 4)
    assert bytes_kept({**factory, "pure_bf16": True}, "ddp") == (4, 0)
    assert bytes_kept({**factory, "use_adam_mini": True}, "ddp") == (4, 4)
    assert bytes_kept({"train_type": "full"}, "ddp") == (4, 0)
    assert bytes_kept({"train_type": "lora"}, "ddp") == (8, 4)  # adapters are float32


def test_quantized_weights_and_fused_losses_are_read():
    for content in (
        {"finetuning_type": "lora", "quantization_bit": 4, "enable_liger_kernel": True},
        {"train_type": "lora", "quant_bits": 4, "use_liger_kernel": True},
        {"learning_rate": 1e-4, "load_in_4bit": True, "use_liger_kernel": True},
    ):
        precision = read_present(content).precision
        assert (precision.weight_bits, precision.fused_loss) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "masks"),
    [
        ({"template": "qwen2_vl", "flash_attn": "fa2"}, False),
        ({"template": "qwen2_vl", "flash_attn": "auto"}, True),
        ({"tuner_type": "full", "attn_impl": "flash_attention_2"}, False),
        ({"learning_rate": 1e-5, "attn_implementation": "flash_attention_3"}, False),
        ({"learning_rate": 1e-5, "attn_implementation": "kernels-community/flash-attn3"}, False),
        ({"learning_rate": 1e-5, "attn_implementation": "sdpa"}, True),
        ({"template": "qwen2_vl", "flash_attn": "false"}, True),
        ({"learning_rate": 1e-5}, True),
    ],
)
def test_flash_attention_needs_no_mask_over_padding(arguments, masks):
    assert asked(read_present(arguments)).scenario.masks is masks


def test_what_matters_and_is_not_read_is_named():
    present = read_present({"learning_rate": 1, "optim": "galore_adamw", "optim_target_modules": ["mlp"]})
    assert present.unread == {"optim": "galore_adamw (counted as AdamW)", "optim_target_modules": "['mlp']"}
    assert present.precision.kept("zero2") == (8, 4)
    assert read_present({"finetuning_type": "full", "use_badam": True, "use_dora": False}).unread == {
        "use_badam": "True"
    }
    zero = {"stage": 3, "zero_quantized_weights": True}
    assert read_present({"zero_optimization": zero}).unread == {"zero_quantized_weights": "True"}


def test_new_parts_of_deepspeed_are_read_or_refused():
    muon = {"type": "Muon", "params": {"lr": 0.02}}
    present = read_present({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "optimizer": muon})
    assert (present.optimizer, present.unread) == ("Muon", {"zero_hpz_partition_size": "8"})
    with pytest.raises(ConfigError, match=r"tensor_parallel\.autotp_size must be 1 or left out, got 4; est"):
        read_present({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}})


def test_preferences_are_no_supervised_training():
    for content, key in (({"finetuning_type": "lora", "stage": "dpo"}, "stage"),
                         ({"train_type": "lora", "rlhf_type": "grpo"}, "rlhf_type")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{key} must be supervised training, got"):
            read_present(content)
