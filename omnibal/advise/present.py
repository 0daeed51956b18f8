"""How somebody trains today, read from the files that they train with.

Known are DeepSpeed's configuration, transformers' ``TrainingArguments``, and the arguments of LLaMA-Factory and
ms-swift. Keys that matter to time and memory are read, all others ignored; defaults are the framework's.

Sources: deepspeed.ai/docs/config-json; transformers ``TrainingArguments``; LLaMA-Factory ``src/llamafactory/hparams``
(``cutoff_len`` 2048, ``image_max_pixels`` 768 × 768, vision tower and projector frozen, recomputation on, unless told
otherwise); ms-swift "Command Line Parameters" (LoRA of rank 8, ViT and aligner frozen, recomputation on). Samples over
a limit of tokens: ms-swift ``swift/template/base.py``; LLaMA-Factory ``data/processor/processor_utils.py``
(``infer_seqlen``); TRL 1.16 ``trainer/sft_trainer.py``; the training code of InternVL, LLaVA, and Qwen-VL (whose
``data_flatten`` cuts nothing).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import yaml

from omnibal.advise.batches import Batching
from omnibal.advise.memory import USUAL, TrainingPrecision, optimizer_of
from omnibal.advise.wait import MEETINGS, Sharding
from omnibal.data.lengths import IntArray
from omnibal.data.packing_spec import Mixture
from omnibal.errors import ConfigError, said
from omnibal.profile.records import FLOAT16, FLOAT32
from omnibal.records import parse_relaxed

Host = Literal["transformers", "llama-factory", "ms-swift", "deepspeed"]
"""What trains; "deepspeed" is a loop of one's own, of which only the ds_config is known."""
Content = Mapping[str, Any]
# Keys that tell whose file it is, and keys of each that are read.
_SWIFT: Final = (
    "truncation_strategy", "train_type", "tuner_type", "freeze_vit", "freeze_aligner", "padding_free", "sft_type",
)  # fmt: skip
_FACTORY: Final = ("finetuning_type", "cutoff_len", "template", "freeze_vision_tower", "neat_packing")
_ARGUMENTS: Final = ("per_device_train_batch_size", "gradient_checkpointing", "learning_rate", "num_train_epochs")
_SWIFT_READ: Final = (
    "train_type", "tuner_type", "lora_rank", "max_length", "packing", "padding_free", "freeze_vit", "freeze_aligner",
    "freeze_llm", "max_pixels", "deepspeed", "quant_bits", "optimizer", "truncation_strategy",
)  # fmt: skip
_FACTORY_READ: Final = (
    "finetuning_type", "cutoff_len", "packing", "neat_packing", "lora_rank", "freeze_vision_tower",
    "freeze_multi_modal_projector", "freeze_language_model", "disable_gradient_checkpointing", "image_max_pixels",
    "pure_bf16", "quantization_bit", "enable_liger_kernel", "use_muon", "use_adam_mini",
)  # fmt: skip
_ARGUMENTS_READ: Final = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "group_by_length", "train_sampling_strategy",
    "gradient_checkpointing", "activation_checkpointing", "fsdp", "model_name_or_path", "model", "optim",
    "use_liger_kernel", "dtype", "torch_dtype", "load_in_4bit", "load_in_8bit", "attn_implementation", "attn_impl",
    "flash_attn",
)  # fmt: skip
ATTENTION: Final = ("attn_implementation", "attn_impl", "flash_attn")  # of TRL, ms-swift and LLaMA-Factory
FLASH: Final = ("fa2", "fa3")  # LLaMA-Factory's names of flash attention; others have "flash" in theirs
# axolotl's keys, none of which another trainer has.
_AXOLOTL: Final = ("micro_batch_size", "sequence_len", "sample_packing", "base_model")
_DEEPSPEED_READ: Final = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# Keys that matter to time or memory, and have no part in an answer.
UNREAD: Final = (
    "optim_target_modules", "use_galore", "use_apollo", "use_badam", "use_unsloth", "use_dft_loss", "use_dora",
    "additional_target", "modules_to_save", "use_logits_to_keep", "loss_type", "activation_offloading",
    "sequence_parallel_size", "context_parallel_size", "tensor_parallel_size", "fp8", "enable_fp8",
    "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size", "sequence_parallel", "autotuning",
)  # fmt: skip
# Sections of DeepSpeed's zero_optimization that put something into the host's memory.
OFFLOADS: Final = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
# Stages of training that take pairs of answers, or make their own.
PREFERENCES: Final = ("dpo", "kto", "orpo", "simpo", "cpo", "rm", "ppo", "grpo", "gkd")
LARGEST_IMAGE: Final = 768 * 768  # LLaMA-Factory's default
USUAL_RANK: Final = 8  # of LoRA's adapters, in LLaMA-Factory and ms-swift
# ms-swift's ``truncation_strategy``: two cut samples, the others leave them out ("split" is for texts).
STRATEGIES: Final = ("delete", "raise", "left", "right", "split")
# Limits of tokens: of TRL's SFTTrainer, and of the training code of InternVL, of Qwen-VL and LLaVA.
LIMITS: Final = ("max_length", "max_seq_length", "model_max_length")
_TRL: Final = (
    "assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy", "truncation_mode",
)  # fmt: skip
TRL_LENGTH: Final = 1024


class Overlong(NamedTuple):
    """What a trainer does with samples over its limit of tokens."""

    setting: str = ""  # the setting that says the limit, as the trainer calls it
    keeps: Literal["nothing", "start", "question and answer"] = "start"

    def targets(self, question: IntArray, answer: IntArray, limit: IntArray) -> IntArray:
        """Target tokens that are kept; LLaMA-Factory leaves whichever is under half of the limit whole."""
        if self.keeps == "start":
            return limit - question
        most = np.where(answer * 2 < limit, limit, limit - question)
        both = (answer * 2 >= limit) & (question * 2 >= limit)
        return np.where(both, limit * answer // np.maximum(question + answer, 1), most)


@dataclass(frozen=True)
class Present:
    """The present way of training; None for what nothing says."""

    host: Host | None = None
    sharding: Sharding | None = None
    batch: int | None = None  # samples of a micro-batch
    accumulation: int | None = None  # Micro-batches per step and rank
    step: int | None = None
    """Samples of a step of all ranks, from which follows what of the two above is not said."""
    batching: Batching | None = None
    offloaded: tuple[str, ...] | None = None  # what the host's memory holds: "optimizer", "parameters"
    cutoff: int | None = None  # most tokens of a sample, or of a pack under "packed"
    overlong: Overlong | None = None  # what becomes of samples over the cutoff
    recompute: bool | None = None
    frozen: tuple[str, ...] | None = None  # modules that are not trained
    lora: int | None = None  # rank of adapters; 0 for none
    max_pixels: int | None = None  # most pixels of an image, to which the host resizes larger ones
    model: str | None = None
    mixture: Mixture | None = None
    optimizer: str | None = None
    pure: bool | None = None
    """Whether plain data parallelism updates 16-bit weights without a float32 copy."""
    master: bool | None = None  # whether DeepSpeed keeps a float32 copy of 16-bit weights
    short_states: bool | None = None  # whether DeepSpeed keeps the optimizer's numbers in 16 bits
    weight_bits: int | None = None
    fused_loss: bool | None = None  # whether Liger's kernels never have all logits
    masks: bool | None = None  # whether padded rows are attended to under a dense mask
    said: Mapping[str, str] = field(default_factory=dict)  # what was read, key by key
    unread: Mapping[str, str] = field(default_factory=dict)  # what matters and was not read, key by key

    def over(self, other: "Present") -> "Present":
        """What this one says, and what only the other one does."""
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
    """What the content of a file that somebody trains with says; ``load`` reads the ds_config that it names.

    >>> present = read_present({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> present.sharding, present.batch
    ('zero2', 4)
    """
    if any(key in content for key in _AXOLOTL):
        raise ConfigError(
            "today must be of a trainer whose keys are known, got one of axolotl; say --today zero3 (or what shares "
            "the model), --batch for micro_batch_size, --accumulation, and --lora"
        )
    if any(key in content for key in _SWIFT):
        return _swift(content).over(_arguments(content, load, "ms-swift"))
    if any(key in content for key in _FACTORY):
        return _factory(content).over(_arguments(content, load, "llama-factory"))
    if any(key in content for key in _ARGUMENTS):
        return _arguments(content, load, "transformers")
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content or "bf16" in content:
        return _deepspeed(content)
    raise ConfigError(
        "today must be a trainer (ddp, zero1, zero2, zero3, fsdp) or a ds_config, TrainingArguments, or arguments of "
        f"LLaMA-Factory or ms-swift, got one with the keys {', '.join(list(content)[:8])}"
    )


def read_today(today: str) -> Present:
    """The present way of training, by a trainer's name or by the file that says it; ``read_present`` has the kinds."""
    if today in MEETINGS:
        return Present(sharding=cast(Any, today))
    path = Path(today)
    if not path.is_file():
        raise ConfigError(f"today must be one of {', '.join(MEETINGS)}, or a file, got {today!r}")

    def load(name: str) -> Content:
        found = next((near for near in (path.parent / name, Path(name)) if near.is_file()), None)
        if found is None:
            raise ConfigError(
                f"deepspeed in {path} must name a file beside it or here, got {name!r}; copy it, or write zero2 or "
                "zero3"
            )
        return _content(found)

    return read_present(_content(path), load)


def _content(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"today must name readable files, got {path}: {said(error)}") from error
    try:
        content = yaml.safe_load(text) if path.suffix.lower() in (".yaml", ".yml") else parse_relaxed(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"today must be JSON or YAML, got {path}: {said(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"today must hold an object, got {path} with a {type(content).__name__}")
    return content


def _deepspeed(content: Content) -> Present:
    zero = _section(content, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3, "auto"):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    sharding = None if stage == "auto" else "ddp" if stage == 0 else f"zero{stage}"
    batch, accumulation, step = (_count(content, key) for key in _DEEPSPEED_READ)
    if batch is not None and step is None and "gradient_accumulation_steps" not in content:
        accumulation = 1  # DeepSpeed's default
    offloaded = tuple(part for part, key in OFFLOADS.items() if _section(zero, key).get("device", "none") != "none")
    optimizer = _section(content, "optimizer").get("type")
    shared = _section(content, "tensor_parallel").get("autotp_size", 0)
    if shared not in (0, 1):
        raise ConfigError(
            f"tensor_parallel.autotp_size must be 1 or left out, got {shared!r}; estimates are of whole layers on each "
            "rank: --layouts weighs tensor ranks"
        )
    half = {**_section(content, "fp16"), **_section(content, "bf16")}
    without = half.get("bf16_master_weights_and_grads") or half.get("fp16_master_weights_and_grads")
    masters = "in 16 bits" if without else None
    told = {"optimizer.type": optimizer, "master_weights_and_grads": masters}
    said = {"zero_optimization.stage": str(stage)} | _said(content, _DEEPSPEED_READ)
    said |= {OFFLOADS[part]: "yes" for part in offloaded} | {key: str(value) for key, value in told.items() if value}
    # Samples are drawn in the shares that repetitions make in any case.
    mixture = _section(_section(content, "omnibal"), "data").get("mixture")
    return Present(
        host="transformers" if _has_auto(content) else "deepspeed",
        sharding=cast(Sharding | None, sharding),
        batch=batch,
        accumulation=accumulation,
        step=step,
        offloaded=offloaded or None,
        mixture=None if mixture in (None, "repeat_time") else Mixture.of(mixture),
        optimizer=_known_optimizer(optimizer),
        master=False if without else None,
        short_states=True if half.get("bf16_optimizer_states") else None,
        said=said,
        unread={**_unread(content, optimizer, "optimizer.type"), **_unread(zero)},
    )


def _has_auto(value: Any) -> bool:
    """Whether a value is left to transformers, which alone fills in ``"auto"``."""
    return value == "auto" or (isinstance(value, Mapping) and any(map(_has_auto, value.values())))


def _arguments(content: Content, load: Callable[[str], Content] | None, host: Host) -> Present:
    """What the keys of transformers say, which all hosts share."""
    strategy = "group_by_length" if content.get("group_by_length") else content.get("train_sampling_strategy")
    # transformers loads weights as they were saved, in 16 bits; plain data parallelism then updates these themselves.
    dtype = str(content.get("dtype") or content.get("torch_dtype") or "auto")
    attention = next((str(content[key]) for key in ATTENTION if content.get(key)), "auto")
    in_float32 = "float32" in dtype or content.get("fp16") or host != "transformers"
    batch = _count(content, "per_device_train_batch_size")
    cutoff, overlong = _limit(content) if host == "transformers" else (None, None)
    own = Present(
        host=host,
        sharding="fsdp" if content.get("fsdp") else None,
        batch=8 if batch is None else batch,
        accumulation=_count(content, "gradient_accumulation_steps") or 1,
        batching=cast(Batching, strategy if strategy in ("group_by_length", "batch_rebalance") else "random"),
        cutoff=cutoff,
        overlong=overlong,
        recompute=bool(content.get("activation_checkpointing") or content.get("gradient_checkpointing")),
        model=content.get("model_name_or_path") or content.get("model"),
        optimizer=_known_optimizer(content.get("optim")),
        pure=None if in_float32 else True,
        weight_bits=4 if content.get("load_in_4bit") else 8 if content.get("load_in_8bit") else None,
        fused_loss=True if content.get("use_liger_kernel") else None,
        masks=False if "flash" in attention or attention in FLASH else None,
        said=_said(content, (*_ARGUMENTS_READ, *(LIMITS if host == "transformers" else ()))),
        unread=_unread(content, content.get("optim"), "optim"),
    )
    named = _named_deepspeed(content.get("deepspeed"), load)
    # a ds_config's optimizer goes before the Trainer's
    return (own if named.optimizer is None else replace(own, optimizer=None)).over(named)


def _limit(content: Content) -> tuple[int | None, Overlong | None]:
    """The limit of tokens that training code around Trainer has, and what it does with longer samples."""
    key = next((name for name in LIMITS if content.get(name) is not None), None)
    if key is None and "max_length" not in content and any(name in content for name in _TRL):
        return TRL_LENGTH, Overlong("max_length, by TRL's default")
    if key is None or (key == "model_max_length" and content.get("data_flatten")):
        return None, None
    return _count(content, key), Overlong(key)


def _named_deepspeed(named: Any, load: Callable[[str], Content] | None) -> Present:
    """What the named ds_config says: in place, in a file, or one of ms-swift's by its name."""
    if not named:
        return Present(sharding="ddp")
    if isinstance(named, Mapping):
        return _deepspeed(named)
    name = str(named)
    for sharding in MEETINGS:
        if name == sharding or name.startswith(f"{sharding}_offload"):
            parts = ("optimizer", "parameters") if sharding == "zero3" else ("optimizer",)
            return Present(sharding=sharding, offloaded=None if name == sharding else parts, said={"deepspeed": name})
    if load is None:
        raise ConfigError(f"deepspeed must be a configuration here, got the file {name}")
    return _deepspeed(load(name))


def _factory(content: Content) -> Present:
    _refuse_preferences(content, "stage")
    packed = content.get("packing") or content.get("neat_packing")
    return Present(
        batching="packed" if packed else None,
        cutoff=_count(content, "cutoff_len") or 2048,
        overlong=Overlong("cutoff_len", "question and answer"),
        recompute=not content.get("disable_gradient_checkpointing", False),
        frozen=_frozen(content, "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
        lora=_lora(content, content.get("finetuning_type", "lora")),
        max_pixels=_count(content, "image_max_pixels") or LARGEST_IMAGE,
        optimizer=next((name for name in ("muon", "adam_mini") if content.get(f"use_{name}")), None),
        pure=True if content.get("pure_bf16") else None,
        weight_bits=_count(content, "quantization_bit"),
        fused_loss=True if content.get("enable_liger_kernel") else None,
        said=_said(content, _FACTORY_READ),
    )


def _swift(content: Content) -> Present:
    _refuse_preferences(content, "rlhf_type")
    strategy = str(content.get("truncation_strategy") or "delete")
    if strategy not in STRATEGIES:
        raise ConfigError(f"truncation_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    kind = content.get("tuner_type", content.get("train_type", content.get("sft_type", "lora")))
    return Present(
        batch=_count(content, "per_device_train_batch_size") or 1,
        batching="packed" if content.get("packing") else "flattened" if content.get("padding_free") else None,
        cutoff=_count(content, "max_length"),
        overlong=Overlong(f"truncation_strategy {strategy}", "start" if strategy in ("left", "right") else "nothing"),
        recompute=bool(content.get("gradient_checkpointing", True)),
        frozen=_frozen(content, "freeze_vit", "freeze_aligner", "freeze_llm"),
        lora=_lora(content, kind),
        max_pixels=_count(content, "max_pixels"),
        optimizer=_known_optimizer(content.get("optimizer")),
        pure=None if "float32" in str(content.get("torch_dtype")) else True,
        weight_bits=_count(content, "quant_bits"),
        said=_said(content, _SWIFT_READ),
        unread=_unread({}, content.get("optimizer"), "optimizer"),
    )


def _frozen(content: Content, vision: str, projector: str, language: str) -> tuple[str, ...]:
    """Modules that are frozen, by the keys that say so; both frameworks train the language model by default."""
    keys = {"vision": (vision, True), "projector": (projector, True), "language": (language, False)}
    return tuple(module for module, (key, default) in keys.items() if content.get(key, default))


def _lora(content: Content, kind: Any) -> int | None:
    return (_count(content, "lora_rank") or USUAL_RANK) if kind == "lora" else None


def _refuse_preferences(content: Content, key: str) -> None:
    """Refuse training on pairs of answers, or on answers that the model gives: nothing here knows its costs."""
    if str(content.get(key)).lower() in PREFERENCES:
        raise ConfigError(f"{key} must be supervised training, got {content[key]!r}; its batches hold other sequences")


def _known_optimizer(name: Any) -> str | None:
    return str(name) if name and optimizer_of(str(name)) else None


def _unread(content: Content, optimizer: Any = None, key: str = "") -> dict[str, str]:
    """What matters and has no part in an answer: a switch that is on (True == 1), but not a degree of 1."""
    unknown = {key: f"{optimizer} (counted as AdamW)"} if optimizer and not _known_optimizer(optimizer) else {}
    return unknown | {
        name: str(content[name])
        for name in UNREAD
        if content.get(name) not in (None, False, "", 0, 1, [], {}, "auto") or content.get(name) is True
    }


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


def _said(content: Content, keys: Sequence[str]) -> dict[str, str]:
    return {key: str(content[key]) for key in keys if content.get(key) not in (None, "auto", "", [])}
