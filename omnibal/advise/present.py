"""How somebody trains today, read from the files that they train with.

Known are DeepSpeed's configuration, transformers' ``TrainingArguments``, and the arguments of LLaMA-Factory and
ms-swift. Keys that matter to time and memory are read, all others ignored; defaults are the framework's.

Sources: deepspeed.ai/docs/config-json; transformers ``TrainingArguments``; LLaMA-Factory ``src/llamafactory/hparams``
(``cutoff_len`` 2048, ``image_max_pixels`` 768 × 768, vision tower and projector frozen, recomputation on, unless told
otherwise); ms-swift "Command Line Parameters" (LoRA of rank 8, ViT and aligner frozen, recomputation on).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.state import FLOAT16, FLOAT32, USUAL, TrainingPrecision, optimizer_of
from omnibal.advise.wait import MEETINGS, Trainer
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError

Host = Literal["transformers", "llama-factory", "ms-swift", "deepspeed"]
Content = Mapping[str, Any]
_SWIFT: Final = ("train_type", "tuner_type", "freeze_vit", "freeze_aligner", "padding_free", "sft_type")
_FACTORY: Final = ("finetuning_type", "cutoff_len", "template", "freeze_vision_tower", "neat_packing")
_ARGUMENTS: Final = ("per_device_train_batch_size", "gradient_checkpointing", "learning_rate", "num_train_epochs")
OFFLOADS: Final = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
"""Sections of DeepSpeed's ``zero_optimization`` that put something into the host's memory."""
PREFERENCES: Final = ("dpo", "kto", "orpo", "simpo", "cpo", "rm", "ppo", "grpo", "gkd")
"""Stages of training that take pairs of answers, or make their own."""
UNREAD: Final = (
    "optim_target_modules", "use_galore", "use_apollo", "use_badam", "use_unsloth", "use_dft_loss", "use_dora",
    "additional_target", "modules_to_save", "use_logits_to_keep", "loss_type", "activation_offloading",
    "sequence_parallel_size", "context_parallel_size", "tensor_parallel_size", "fp8", "enable_fp8",
    "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size", "tensor_parallel",
    "sequence_parallel", "autotuning",
)  # fmt: skip
"""Keys that matter to time or memory, and have no part in an answer."""
LARGEST_IMAGE: Final = 768 * 768
"""Pixels, by LLaMA-Factory's default."""


@dataclass(frozen=True)
class Present:
    """The present way of training; None for what nothing says.

    Attributes:
        host: What trains.
        trainer: How ranks share their work.
        batch: Samples of a micro-batch.
        accumulation: Micro-batches per step and rank.
        step: Samples of a step of all ranks, for what of the two above is not said.
        batching: What shares a micro-batch.
        offloaded: What the host's memory holds: "optimizer", "parameters".
        cutoff: Most tokens of a sample, or of a pack under ``"packed"``.
        recompute: Whether layers recompute (gradient checkpointing).
        frozen: Modules that are not trained.
        lora: Rank of adapters.
        max_pixels: Of an image.
        model: Its name or folder.
        mixture: What share each source gets.
        optimizer: Its name.
        pure: Whether plain data parallelism updates 16-bit weights without a float32 copy.
        master: Whether DeepSpeed keeps a float32 copy of 16-bit weights.
        short_states: Whether DeepSpeed keeps the optimizer's numbers in 16 bits.
        weight_bits: Of frozen weights.
        fused_loss: Whether Liger's kernels keep logits away.
        said: What was read, key by key.
        unread: What matters and was not read, key by key.
    """

    host: Host | None = None
    trainer: Trainer | None = None
    batch: int | None = None
    accumulation: int | None = None
    step: int | None = None
    batching: Batching | None = None
    offloaded: tuple[str, ...] | None = None
    cutoff: int | None = None
    recompute: bool | None = None
    frozen: tuple[str, ...] | None = None
    lora: int | None = None
    max_pixels: int | None = None
    model: str | None = None
    mixture: Mixture | None = None
    optimizer: str | None = None
    pure: bool | None = None
    master: bool | None = None
    short_states: bool | None = None
    weight_bits: int | None = None
    fused_loss: bool | None = None
    said: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    def over(self, other: "Present") -> "Present":
        """What this says, and what only the other does."""
        mine = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in ("said", "unread")}
        given = {name: value for name, value in mine.items() if value is not None}
        return replace(other, **given, said={**other.said, **self.said}, unread={**other.unread, **self.unread})

    @property
    def precision(self) -> TrainingPrecision:
        """What a trained parameter takes; AdamW with float32 copies of 16-bit weights where nothing says otherwise."""
        return TrainingPrecision(
            optimizer_of(self.optimizer or "adamw") or USUAL.optimizer,
            pure=bool(self.pure) and not self.lora,
            master=self.master is not False,
            state_bytes=FLOAT16 if self.short_states else FLOAT32,
            weight_bits=self.weight_bits or USUAL.weight_bits,
            fused_loss=bool(self.fused_loss),
        )


def read_present(content: Content, load: Callable[[str], Content] | None = None) -> Present:
    """What a file that somebody trains with says.

    Args:
        content: Of the file.
        load: Gives the content of a file that this one names, such as a ds_config; None to know nothing of it.

    Raises:
        ConfigError: It is none of the known kinds, or a value that matters is wrong; the message names the key.

    >>> present = read_present({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> present.trainer, present.batch
    ('zero2', 4)
    """
    if any(key in content for key in _SWIFT):
        return _swift(content, load)
    if any(key in content for key in _FACTORY):
        return _factory(content, load)
    if any(key in content for key in _ARGUMENTS):
        return _arguments(content, load, "transformers")
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content or "bf16" in content:
        return _deepspeed(content)
    raise ConfigError(
        "today must be a trainer (ddp, zero1, zero2, zero3, fsdp) or a ds_config, TrainingArguments, or arguments of "
        f"LLaMA-Factory or ms-swift, got one with the keys {', '.join(list(content)[:8])}"
    )


def _deepspeed(content: Content) -> Present:
    zero = _section(content, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3, "auto"):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    trainer: Trainer | None = None if stage == "auto" else ("ddp" if stage == 0 else f"zero{stage}")  # type: ignore[assignment]
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    batch, accumulation, step = (_count(content, key) for key in keys)
    if batch is not None and step is None and keys[1] not in content:
        accumulation = 1  # DeepSpeed's default
    offloaded = tuple(part for part, key in OFFLOADS.items() if _section(zero, key).get("device", "none") != "none")
    said = (
        {"zero_optimization.stage": str(stage)} | _said(content, keys) | {OFFLOADS[part]: "yes" for part in offloaded}
    )
    optimizer = _section(content, "optimizer").get("type")
    half = {**_section(content, "fp16"), **_section(content, "bf16")}
    without = half.get("bf16_master_weights_and_grads") or half.get("fp16_master_weights_and_grads")
    said |= {"optimizer.type": str(optimizer)} if optimizer else {}
    said |= {"master_weights_and_grads": "in 16 bits"} if without else {}
    asked = _section(_section(content, "omnibal"), "data").get("mixture")
    # A draw of the data has the shares that its repetitions make.
    mixture = None if asked in (None, "repeat_time") else Mixture.of(asked)
    return Present(
        host="transformers" if _has_auto(content) else "deepspeed", trainer=trainer, batch=batch,
        accumulation=accumulation, step=step, offloaded=offloaded or None, mixture=mixture,
        optimizer=_optimizer(optimizer), master=False if without else None,
        short_states=True if half.get("bf16_optimizer_states") else None, said=said,
        unread={**_unread(content, optimizer, "optimizer.type"), **_unread(zero)},
    )  # fmt: skip


def _has_auto(value: Any) -> bool:
    """Whether a value is left to transformers, which alone fills in ``"auto"``."""
    return value == "auto" or (isinstance(value, Mapping) and any(map(_has_auto, value.values())))


def _arguments(content: Content, load: Callable[[str], Content] | None, host: Host) -> Present:
    """Of transformers, whose keys the others share."""
    strategy = "group_by_length" if content.get("group_by_length") else content.get("train_sampling_strategy")
    keys = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "group_by_length", "train_sampling_strategy",
        "gradient_checkpointing", "activation_checkpointing", "fsdp", "model_name_or_path", "model", "optim",
        "use_liger_kernel", "dtype", "torch_dtype", "load_in_4bit", "load_in_8bit",
    )  # fmt: skip
    # transformers loads weights as they were saved, in 16 bits; plain data parallelism then updates these themselves
    kept = str(content.get("dtype") or content.get("torch_dtype") or "auto")
    in_float32 = "float32" in kept or content.get("fp16") or host != "transformers"
    batch, accumulation = _count(content, keys[0]), _count(content, keys[1])
    own = Present(
        host=host,
        trainer="fsdp" if content.get("fsdp") else None,
        batch=8 if batch is None else batch,
        accumulation=accumulation or 1,
        batching=strategy if strategy in ("group_by_length", "batch_rebalance") else "random",  # type: ignore[arg-type]
        recompute=bool(content.get("activation_checkpointing") or content.get("gradient_checkpointing")),
        model=content.get("model_name_or_path") or content.get("model"),
        optimizer=_optimizer(content.get("optim")),
        pure=None if in_float32 else True,
        weight_bits=4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else None,
        fused_loss=True if content.get("use_liger_kernel") else None,
        said=_said(content, keys),
        unread=_unread(content, content.get("optim"), "optim"),
    )
    beside = _beside(content.get("deepspeed"), load)
    # a ds_config's optimizer goes before the Trainer's
    return (own if beside.optimizer is None else replace(own, optimizer=None)).over(beside)


def _beside(named: Any, load: Callable[[str], Content] | None) -> Present:
    """What the named ds_config says: in place, in a file, or one of ms-swift's by its name."""
    if not named:
        return Present(trainer="ddp")
    if isinstance(named, Mapping):
        return _deepspeed(named)
    name = str(named)
    for trainer in MEETINGS:
        if name == trainer or name.startswith(f"{trainer}_offload"):
            parts = ("optimizer", "parameters") if trainer == "zero3" else ("optimizer",)
            return Present(trainer=trainer, offloaded=None if name == trainer else parts, said={"deepspeed": name})
    if load is None:
        raise ConfigError(f"deepspeed must be a configuration here, got the file {name}")
    return _deepspeed(load(name))


def _factory(content: Content, load: Callable[[str], Content] | None) -> Present:
    kind = content.get("finetuning_type", "lora")
    _refuse_preferences(content, "stage")
    special = next((name for name in ("muon", "adam_mini") if content.get(f"use_{name}")), None)
    packing = "packed" if content.get("packing") or content.get("neat_packing") else None
    frozen = [
        module
        for key, module, default in (
            ("freeze_vision_tower", "vision", True),
            ("freeze_multi_modal_projector", "projector", True),
            ("freeze_language_model", "language", False),
        )
        if content.get(key, default)
    ]
    keys = ("finetuning_type", "cutoff_len", "packing", "neat_packing", "lora_rank", "freeze_vision_tower",
            "freeze_multi_modal_projector", "freeze_language_model", "disable_gradient_checkpointing",
            "image_max_pixels", "pure_bf16", "quantization_bit", "enable_liger_kernel", "use_muon",
            "use_adam_mini")  # fmt: skip
    own = Present(
        batching=packing,  # type: ignore[arg-type]
        cutoff=_count(content, "cutoff_len") or 2048,
        recompute=not content.get("disable_gradient_checkpointing", False),
        frozen=tuple(frozen),
        lora=(_count(content, "lora_rank") or 8) if kind == "lora" else None,
        max_pixels=_count(content, "image_max_pixels") or LARGEST_IMAGE,
        optimizer=special,
        pure=True if content.get("pure_bf16") else None,
        weight_bits=_count(content, "quantization_bit"),
        fused_loss=True if content.get("enable_liger_kernel") else None,
        said=_said(content, keys),
    )
    return own.over(_arguments(content, load, "llama-factory"))


def _swift(content: Content, load: Callable[[str], Content] | None) -> Present:
    kind = content.get("tuner_type", content.get("train_type", content.get("sft_type", "lora")))
    _refuse_preferences(content, "rlhf_type")
    special = content.get("optimizer")
    frozen = [
        module
        for key, module, default in (
            ("freeze_vit", "vision", True),
            ("freeze_aligner", "projector", True),
            ("freeze_llm", "language", False),
        )
        if content.get(key, default)
    ]
    batching = "packed" if content.get("packing") else "flattened" if content.get("padding_free") else None
    keys = ("train_type", "tuner_type", "lora_rank", "max_length", "packing", "padding_free", "freeze_vit",
            "freeze_aligner", "freeze_llm", "max_pixels", "deepspeed", "quant_bits", "optimizer")  # fmt: skip
    own = Present(
        batch=_count(content, "per_device_train_batch_size") or 1,
        batching=batching,  # type: ignore[arg-type]
        cutoff=_count(content, "max_length"),
        recompute=bool(content.get("gradient_checkpointing", True)),
        frozen=tuple(frozen),
        lora=(_count(content, "lora_rank") or 8) if kind == "lora" else None,
        max_pixels=_count(content, "max_pixels"),
        optimizer=_optimizer(special),
        pure=None if "float32" in str(content.get("torch_dtype")) else True,
        weight_bits=_count(content, "quant_bits"),
        said=_said(content, keys),
        unread=_unread({}, special, "optimizer"),
    )
    return own.over(_arguments(content, load, "ms-swift"))


def _refuse_preferences(content: Content, key: str) -> None:
    """Refuse training on pairs of answers, or on answers that the model gives: nothing here knows its costs."""
    if str(content.get(key)).lower() in PREFERENCES:
        raise ConfigError(f"{key} must be supervised training, got {content[key]!r}; its batches hold other sequences")


def _optimizer(name: Any) -> str | None:
    return str(name) if name and optimizer_of(str(name)) else None


def _unread(content: Content, optimizer: Any = None, key: str = "") -> dict[str, str]:
    """What matters and has no part in an answer."""
    unknown = {key: f"{optimizer} (counted as AdamW)"} if optimizer and not _optimizer(optimizer) else {}
    return unknown | {
        name: str(content[name]) for name in UNREAD if content.get(name) not in (None, False, "", 0, 1, [], {}, "auto")
        or content.get(name) is True
    }  # fmt: skip


def _section(content: Content, key: str) -> Content:
    found = content.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} must be an object, got {found!r}")
    return found


def _count(content: Content, key: str) -> int | None:
    value = content.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def _said(content: Content, keys: Any) -> dict[str, str]:
    return {key: str(content[key]) for key in keys if content.get(key) not in (None, "auto", "", [])}
