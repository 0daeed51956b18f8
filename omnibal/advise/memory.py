"""What a data-parallel rank holds at its peak, with the whole model on it or its share of it under ZeRO and FSDP.

Assumptions, beside those of counted costs: gradients in 16 bits; ZeRO 3 and FSDP hold two gathered layers at a time;
the loss takes the logits of all tokens in float32, as transformers' own does whatever the labels, or those of target
rows, some at a time. At the update activations have gone, and copies of gradients are there.

Sources: the states that torch's, bitsandbytes' and transformers' optimizers allocate; DeepSpeed's ZeRO optimizers,
which update a float32 copy of 16-bit weights by float32 copies of gradients (``runtime/zero``); Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, and "QLoRA", NeurIPS 2023.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple, cast

import numpy as np

from omnibal.advise.wait import Sharding, phase_costs
from omnibal.cluster import Cluster, Layout
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, fullest_load
from omnibal.data.packs import Packs
from omnibal.data.step_size import StepSize
from omnibal.device import usable_bytes
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import GRADIENT_SHARE, NOT_OFFERED, loss_bytes
from omnibal.memory.recompute import least_recompute, recompute_seconds
from omnibal.profile.records import ELEMENT_BYTES, FLOAT16, FLOAT32, LEVELS, LayerCost, Level, ModelProfile, every_layer

HALVING: Final = 1.05
"""What packs of half the size must gain to be taken: on one H200, 8B packs of 8 samples trained 3.5 % more tokens a
second than packs of 4, both recomputing all, which counted costs do not know."""
HALVES: Final = (2, 4)  # how many times smaller than a batch packs are tried
# Layers whose parameters are matrices, but for a few: Muon keeps less of these than of embeddings, heads and norms.
BLOCKS: Final = (
    "vision_block", "window_block", "deepstack_block", "decoder_block", "projector", "sound_block", "sound_projector",
)  # fmt: skip
# Parameters of a rank's share under ZeRO 3 that are updated at a time: DeepSpeed's default of sub_group_size.
UPDATED_AT_ONCE: Final = 10**9
# Bytes of a gradient's copies at the update under ZeRO: in float32, and the flat 16-bit one that this is made of.
COPIED: Final = FLOAT32 + FLOAT16
QUANTIZED_BITS: Final = {4: 4.5, 8: 8.0}  # bits of a quantized weight with the scales of its blocks
# Bytes per logit at the loss's peak, in its backward pass: float32 of the logarithmic softmax, its gradient, and the
# logits' gradient; the 16-bit logits have gone. Measured in a step of transformers' Trainer (tests/advise/test_memory).
LOGIT_BYTES: Final = 12
SHARED: Final[dict[Sharding, tuple[str, ...]]] = {
    "ddp": (),
    "zero1": ("optimizer_bytes",),
    "zero2": ("optimizer_bytes", "gradient_bytes"),
    "zero3": ("optimizer_bytes", "gradient_bytes", "parameter_bytes"),
    "fsdp": ("optimizer_bytes", "gradient_bytes", "parameter_bytes"),
}
"""What ranks hold only their share of."""


Word = Literal["fill", "none", "full"]
"""What becomes of a part's layers under gradient checkpointing: as many recompute as must, none, or all."""


def free_levels(
    profile: ModelProfile, flagged: Collection[int] | None = None, words: Mapping[str, Word] | None = None
) -> tuple[Level | None, ...]:
    """The level that each layer keeps under gradient checkpointing, or None for one that is free to be chosen.

    Args:
        profile: The model's layers.
        flagged: Numbers of the layers that recompute by a flag of their own; by default all blocks, as in transformers.
        words: What becomes of a part ("vision", "sound", "language"); by default all are filled.
    """
    if flagged is None:
        flagged = {index for index, layer in enumerate(profile.layers) if layer.kind.endswith("_block")}
    given = list[Level | None]()
    for index, (layer, is_reached) in enumerate(zip(profile.layers, profile.reached, strict=True)):
        word = (words or {}).get(layer.module, "fill")
        if index not in flagged:  # embeddings, norms and the like never recompute in transformers
            given.append("none")
        elif word == "fill":
            given.append(None if is_reached else "none")  # no backward pass needs what others keep
        else:
            given.append(cast(Level, word))
    return tuple(given)


class Optimizer(NamedTuple):
    """How many numbers an optimizer keeps of a trained parameter, and how large they are."""

    numbers: float  # numbers per parameter of a matrix in one of BLOCKS
    elsewhere: float  # numbers per parameter of embeddings, heads and norms
    number_bytes: float | None = None
    """Bytes of such a number; None for the dtype of the weights that are updated."""
    is_pageable: bool = False  # whether what does not fit goes to the host's memory


_EIGHT_BIT: Final = 1 + FLOAT32 / 256  # with a scale for each block of 256
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    **dict.fromkeys(
        ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf",
         "adamw_apex_fused", "fusedadam", "cpuadam", "stable_adamw", "schedule_free_adamw", "schedule_free_radam",
         "lamb"),
        Optimizer(2, 2),
    ),
    **dict.fromkeys(("adamw_anyprecision", "adamw_32bit"), Optimizer(2, 2, FLOAT32)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), Optimizer(2, 2, _EIGHT_BIT)),
    "adamw_torch_4bit": Optimizer(2, 2, 0.5 + FLOAT32 / 128),
    **dict.fromkeys(("ademamix", "ademamix_32bit"), Optimizer(3, 3, FLOAT32)),
    "ademamix_8bit": Optimizer(3, 3, _EIGHT_BIT),
    **dict.fromkeys(("lion", "rmsprop", "adagrad", "schedule_free_sgd", "adam_mini"), Optimizer(1, 1)),
    **dict.fromkeys(("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), Optimizer(1, 1, FLOAT32)),
    **dict.fromkeys(("lion_8bit", "rmsprop_bnb_8bit"), Optimizer(1, 1, _EIGHT_BIT)),
    "muon": Optimizer(1, 2),
    **dict.fromkeys(("adafactor", "sgd"), Optimizer(0, 0)),  # Adafactor keeps sums of rows and of columns
}  # fmt: skip
"""By the names of ``TrainingArguments`` and ds_configs, in small letters; ``paged_`` before one makes it pageable."""


def optimizer_of(name: str) -> Optimizer | None:
    """What is known of an optimizer by its name; None of an unknown one.

    >>> optimizer_of("paged_adamw_8bit").is_pageable, optimizer_of("galore_adamw")
    (True, None)
    """
    plain = name.lower().replace("-", "_").rpartition(".")[2]
    found = OPTIMIZERS.get(plain.removeprefix("paged_"))
    return None if found is None else found._replace(is_pageable=plain.startswith("paged_"))


@dataclass(frozen=True)
class TrainingPrecision:
    """Bytes of parameters beside what the forward pass needs: by default AdamW's, 16 per trained parameter in all."""

    optimizer: Optimizer = OPTIMIZERS["adamw"]
    pure: bool = False
    """Whether plain data parallelism updates 16-bit weights themselves, without a float32 copy."""
    master: bool = True  # whether DeepSpeed keeps a float32 copy of 16-bit weights
    state_bytes: int = FLOAT32
    """Bytes of a number that the optimizer keeps, where the optimizer does not say."""
    weight_bits: int = 16  # bits of frozen weights in the language model's blocks
    fused_loss: bool = False  # whether the loss never has the logits of all tokens (Liger's kernels)
    autocast: bool = False
    """Whether weights and gradients are in float32, and layers compute with 16-bit copies of the weights."""

    def kept(self, sharding: Sharding, kind: str = "decoder_block") -> tuple[float, float]:
        """Bytes per trained parameter of a layer of some kind: optimizer state, and float32 copy of a 16-bit weight."""
        pure, optimizer = self.pure and sharding == "ddp", self.optimizer
        size = optimizer.number_bytes
        if size is None:
            size = FLOAT16 if pure else self.state_bytes
        elif kind == "text_embedding":  # transformers has bitsandbytes keep 32 bits of embeddings
            size = max(size, FLOAT32)
        numbers = optimizer.numbers if kind in BLOCKS else optimizer.elsewhere
        return numbers * size * (not optimizer.is_pageable), FLOAT32 * float(self.master and not pure)

    def applied(self, profile: ModelProfile, sharding: Sharding) -> ModelProfile:
        """The profile with the bytes that layers hold, and the seconds of their updates, under this precision."""
        element = ELEMENT_BYTES[profile.dtype]
        return replace(profile, layers=tuple(self._layer(layer, element, sharding) for layer in profile.layers))

    def copied_bytes(self, profile: ModelProfile, sharding: Sharding, ranks: int) -> float:
        """Bytes of gradients' copies on a rank at the update, under ZeRO with a float32 copy of the weights."""
        if not self.master or sharding not in ("zero1", "zero2", "zero3"):
            return 0.0
        share = sum(layer.gradient_bytes for layer in profile.layers) / ELEMENT_BYTES[profile.dtype] / ranks
        return COPIED * min(share, UPDATED_AT_ONCE if sharding == "zero3" else share)

    def _layer(self, layer: LayerCost, element: int, sharding: Sharding) -> LayerCost:
        states, master = self.kept(sharding, layer.kind)
        # ZeRO updates copies even of float32 weights.
        has_copies = element == FLOAT16 or sharding in ("zero1", "zero2", "zero3")
        held = layer.gradient_bytes / element * (states + (master if has_copies else 0.0))
        # An update reads and writes what it holds; its seconds were counted for the bytes of the profile.
        moved = 2 * (layer.optimizer_bytes + layer.gradient_bytes)
        parameters = float(layer.parameter_bytes)
        if layer.kind == "decoder_block":
            frozen = max(parameters - layer.gradient_bytes, 0.0)
            parameters += frozen * (QUANTIZED_BITS.get(self.weight_bits, 16.0) / 16 - 1)
        gradients = layer.gradient_bytes
        if self.autocast:  # trained weights are counted among the copies that are updated
            parameters += max(layer.parameter_bytes - gradients, 0) * FLOAT32 // FLOAT16
            gradients *= FLOAT32 // FLOAT16
        return replace(
            layer,
            parameter_bytes=round(parameters),
            gradient_bytes=gradients,
            optimizer_bytes=round(held),
            optimizer_seconds=layer.optimizer_seconds * (2 * (held + layer.gradient_bytes) / moved if moved else 1.0),
        )


USUAL: Final = TrainingPrecision()


@dataclass(frozen=True)
class RankMemory:
    profile: ModelProfile
    sharding: Sharding
    cluster: Cluster
    recompute: Level | tuple[Level, ...]
    """One level for all layers, or one for each; a layer that does not have it recomputes nothing."""
    target_rows: bool = False
    offloaded: tuple[str, ...] = ()
    """What the host's memory holds, as far as ranks share it: "optimizer" (gradients with it, which DeepSpeed updates
    there), "parameters"."""
    precision: TrainingPrecision = USUAL
    buffer_bytes: int = 0
    """Copies of gradients on their way to other ranks, which stay from step to step."""

    @cached_property
    def held(self) -> ModelProfile:
        return self.precision.applied(self.profile, self.sharding)

    @property
    def budget_bytes(self) -> int:
        return self.cluster.stage_memory_bytes(Layout(num_replicas=self.cluster.num_devices))[0]

    @property
    def with_margin(self) -> "RankMemory":
        """What the rank holds, on a device that has only the memory that ``usable_bytes`` leaves of this one."""
        most = max(usable_bytes(self.budget_bytes), self.cluster.overhead_bytes + 1)
        return replace(self, cluster=replace(self.cluster, memory_bytes=most))

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, optimizer state and what the process holds beside the model."""
        shared, layers = SHARED[self.sharding], self.held.layers
        total = self.cluster.overhead_bytes + self.buffer_bytes
        # A head that is tied to the embedding holds nothing of its own.
        embeddings = {layer.tied_key for layer in layers if layer.kind != "head" and layer.tied_key is not None}
        layers_once = [layer for layer in layers if layer.kind != "head" or layer.tied_key not in embeddings]
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            held = sum(getattr(layer, name) for layer in layers_once)
            if name in shared:
                is_offloaded = ("parameters" if name == "parameter_bytes" else "optimizer") in self.offloaded
                held = 0 if is_offloaded else -(-held // self.cluster.num_devices)
            total += held
        if "parameter_bytes" in shared:  # one layer runs while the next one is gathered
            total += 2 * max(layer.parameter_bytes for layer in layers)
        return total

    @property
    def update_bytes(self) -> float:
        if "optimizer" in self.offloaded and "optimizer_bytes" in SHARED[self.sharding]:
            return 0.0
        return self.precision.copied_bytes(self.profile, self.sharding, self.cluster.num_devices)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The recompute level of each layer."""
        given = self.recompute
        return self.profile.levels_like(
            every_layer(given, len(self.profile.layers)) if isinstance(given, str) else given
        )

    def peak_bytes(self, loads: Load) -> FloatArray:
        """What a rank holds while each micro-batch runs, or at the update if it is more, in the shape of the loads."""
        kept = sum((saved[level] for saved, level in self._kept.values()), start=CostModel())
        # When the first backward pass begins, the loss's logits have gone.
        running = kept(loads) + self._passing_bytes(loads)
        held: FloatArray = self.state_bytes + np.maximum(running, self.update_bytes)
        return held

    def filled(
        self, load: Load, seconds: FloatArray, given: Sequence[Level | None], budget_bytes: float | None = None
    ) -> "RankMemory | None":
        """The levels of least recomputation under which a micro-batch fits the budget; None if none do.

        Args:
            load: What the largest micro-batch of the run holds.
            seconds: What each level adds to a layer's backward pass, shape (layers, levels).
            given: From ``free_levels``; a layer that is free recomputes nothing or everything.
            budget_bytes: What a rank may hold; by default what its device has.
        """
        budget_bytes = self.budget_bytes if budget_bytes is None else budget_bytes
        for everything in ("none", "full"):
            tried = replace(self, recompute=tuple(level or everything for level in given))
            if tried.peak_bytes(load) <= budget_bytes:
                break
        else:
            return None
        if everything == "none":
            return tried
        # A backward pass is taken to need what it needs where every free layer recomputes: no choice needs more.
        room = int(budget_bytes) - self.state_bytes - int(np.ceil(tried._passing_bytes(load)))

        def kept_bytes(layer: int, level: Level) -> int:
            if level not in (("none", "full") if given[layer] is None else (tried.levels[layer],)):
                return NOT_OFFERED
            saved = tried._kept.get(layer)
            return 0 if saved is None else int(np.ceil(saved[0][level](load)))

        kept = np.array([[kept_bytes(layer, level) for level in LEVELS] for layer in range(len(given))])
        chosen = least_recompute(kept, np.zeros_like(kept), seconds, room_bytes=room)
        return tried if chosen is None else replace(self, recompute=tuple(LEVELS[column] for column in chosen))

    @cached_property
    def _kept(self) -> dict[int, tuple[Mapping[str, CostModel], Level]]:
        """What layers that the backward pass runs keep at each level, and their own level; by number."""
        # Of the head only logits count, as transformers has all of them at one time.
        layers = enumerate(zip(self.profile.layers, self.profile.reached, self.levels, strict=True))
        return {
            index: (layer.saved_bytes, level)
            for index, (layer, is_reached, level) in layers
            if is_reached and layer.kind != "head"
        }

    def _passing_bytes(self, loads: Load) -> FloatArray:
        """The most that a layer's backward pass needs beyond what is kept, or the loss."""
        # Recomputed activations, and gradients.
        working = {saved["none"] * ((level != "none") + GRADIENT_SHARE) for saved, level in self._kept.values()}
        passing: FloatArray = np.max([cost(loads) for cost in working], axis=0)
        head = next(layer for layer in self.profile.layers if layer.kind == "head")
        if self.target_rows or self.precision.fused_loss:
            logits = loss_bytes(head, loads.target_tokens if self.target_rows else loads.llm_tokens)
        else:
            logits = LOGIT_BYTES * head.sizes["vocab"] * loads.llm_tokens
        found: FloatArray = np.maximum(passing, logits)
        return found


@dataclass(frozen=True)
class Filling:
    """Which layers recompute beside packs of some limits: only those that must, by memory and by costs."""

    given: tuple[Level | None, ...]
    """The level that each layer of the profile keeps, or None for one that is chosen; ``free_levels`` tells them."""
    memory: RankMemory | None
    """None: memory is not known, and layers that are free recompute."""
    costs: ModelProfile

    def levels(self, memory: RankMemory | None) -> tuple[Level, ...]:
        return tuple(level or "full" for level in self.given) if memory is None else memory.levels

    def chosen(self, lengths: SampleLengths, limits: PackLimits, *, spare_bytes: float = 0) -> RankMemory | None:
        """Memory under the levels that cost the least time and let every pack fit; all recomputed where none do.

        Args:
            spare_bytes: What the device was measured to have beyond what is counted.
        """
        if self.memory is None:
            return None
        seconds, budget = recompute_seconds(self.costs, total_load(lengths)), self.memory.budget_bytes + spare_bytes
        found = self.memory.filled(fullest_load(lengths, limits), seconds, self.given, budget)
        return replace(self.memory, recompute=self.levels(found))

    def seconds(self, lengths: SampleLengths, levels: Sequence[Level]) -> float:
        """Seconds that all samples take one rank, by costs."""
        load = total_load(lengths)
        return float(sum(float(cost(load).sum()) for cost in phase_costs(self.costs, recompute=tuple(levels)).values()))

    def best_size(
        self, lengths: SampleLengths, size: StepSize, batch_size: int, fit: Callable[[int], StepSize]
    ) -> StepSize:
        """The packs at hand, or smaller ones that recompute less, if that makes up for their number."""
        # ``size`` is for ``batch_size`` samples a pack; ``fit`` finds limits and micro-batches for fewer.

        def seconds_of(size: StepSize) -> float:
            return self.seconds(lengths, self.levels(self.chosen(lengths, size.limits)))

        best, least = size, seconds_of(size)
        floor = self.seconds(lengths, [level or "none" for level in self.given])
        for number, halves in enumerate(HALVES, 1):
            if least <= floor * HALVING or batch_size // halves < 2:
                break
            try:
                smaller = fit(batch_size // halves)
            except InfeasibleError:
                break
            seconds = seconds_of(smaller) * HALVING**number
            if seconds < least:
                best, least = smaller, seconds
        return best


def total_load(lengths: SampleLengths) -> Load:
    return Packs(np.arange(len(lengths)), np.array([0, len(lengths)])).load(lengths)
