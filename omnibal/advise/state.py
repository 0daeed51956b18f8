"""What a trained parameter takes beside its forward pass, by optimizer and precision, and what frozen weights take.

Sources: the states that torch's, bitsandbytes' and transformers' optimizers allocate; DeepSpeed's ZeRO optimizers,
which update a float32 copy of 16-bit weights by float32 copies of gradients (``runtime/zero``); Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, and "QLoRA", NeurIPS 2023.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from omnibal.advise.wait import Trainer
from omnibal.profile.records import LayerCost, ModelProfile

FLOAT32, FLOAT16 = 4, 2
ELEMENTS: Final = {"bfloat16": FLOAT16, "float32": FLOAT32}
"""Bytes of a number by a profile's dtype."""
BLOCKS: Final = ("vision_block", "window_block", "deepstack_block", "decoder_block", "projector")
"""Layers whose parameters are matrices, but for a few."""
UPDATED_AT_ONCE: Final = 10**9
"""Parameters of a rank's share under ZeRO 3 that are updated at a time (``sub_group_size``)."""
COPIED: Final = FLOAT32 + FLOAT16
"""Of a gradient at the update under ZeRO: its float32 copy, and the flat 16-bit one that this is made of."""
QUANTIZED_BITS: Final = {4: 4.5, 8: 8.0}
"""Of a weight that is kept in so few, with the scales of its blocks."""


class Optimizer(NamedTuple):
    """What an optimizer keeps of a trained parameter."""

    numbers: float
    """Of a matrix's parameter."""
    elsewhere: float
    """Of a parameter of embeddings, heads and norms."""
    number_bytes: float | None = None
    """Of such a number in a matrix; None for the dtype of the weights that are updated."""
    is_pageable: bool = False
    """Whether what does not fit goes to the host's memory."""


_EIGHT_BIT: Final = 1 + FLOAT32 / 256
"""With a scale for each block of 256."""
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
    "ademamix": Optimizer(3, 3, FLOAT32),
    "ademamix_32bit": Optimizer(3, 3, FLOAT32),
    "ademamix_8bit": Optimizer(3, 3, _EIGHT_BIT),
    "lion": Optimizer(1, 1),
    "lion_32bit": Optimizer(1, 1, FLOAT32),
    "lion_8bit": Optimizer(1, 1, _EIGHT_BIT),
    "rmsprop": Optimizer(1, 1),
    "rmsprop_bnb": Optimizer(1, 1, FLOAT32),
    "rmsprop_bnb_32bit": Optimizer(1, 1, FLOAT32),
    "rmsprop_bnb_8bit": Optimizer(1, 1, _EIGHT_BIT),
    "adagrad": Optimizer(1, 1),
    "schedule_free_sgd": Optimizer(1, 1),
    "muon": Optimizer(1, 2),
    "adam_mini": Optimizer(1, 1),
    "adafactor": Optimizer(0, 0),  # sums of rows and of columns
    "sgd": Optimizer(0, 0),
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
    """Bytes of parameters beside what the forward pass needs.

    Attributes:
        optimizer: What it keeps.
        pure: Whether plain data parallelism updates 16-bit weights themselves, without a float32 copy.
        master: Whether DeepSpeed keeps a float32 copy of 16-bit weights.
        state_bytes: Of a number of the optimizer's, where it does not say.
        weight_bits: Of frozen weights in the language model's blocks.
        fused_loss: Whether the loss never has the logits of all tokens (Liger's kernels).
    """

    optimizer: Optimizer = OPTIMIZERS["adamw"]
    pure: bool = False
    master: bool = True
    state_bytes: int = FLOAT32
    weight_bits: int = 16
    fused_loss: bool = False

    def kept(self, trainer: Trainer, kind: str = "decoder_block") -> tuple[float, float]:
        """Bytes of optimizer state, and of the float32 copy of a 16-bit weight, for each trained parameter.

        Args:
            trainer: How ranks share their work.
            kind: Of the layer.
        """
        pure, keeps = self.pure and trainer == "ddp", self.optimizer
        size = keeps.number_bytes
        if size is None:
            size = FLOAT16 if pure else self.state_bytes
        if kind == "text_embedding":  # transformers has bitsandbytes keep 32 bits here
            size = max(size, FLOAT32) if keeps.number_bytes is not None else size
        numbers = keeps.numbers if kind in BLOCKS else keeps.elsewhere
        return numbers * size * (not keeps.is_pageable), FLOAT32 * float(self.master and not pure)

    def applied(self, profile: ModelProfile, trainer: Trainer) -> ModelProfile:
        """A profile whose layers hold, and whose updates take, what this says of them."""
        return replace(profile, layers=tuple(self._layer(layer, profile, trainer) for layer in profile.layers))

    def copied_bytes(self, profile: ModelProfile, trainer: Trainer, ranks: int) -> float:
        """What copies of gradients take on a rank at the update, under ZeRO with a float32 copy of the weights."""
        if not self.master or trainer not in ("zero1", "zero2", "zero3"):
            return 0.0
        share = sum(layer.gradient_bytes for layer in profile.layers) / ELEMENTS[profile.dtype] / ranks
        return COPIED * min(share, UPDATED_AT_ONCE if trainer == "zero3" else share)

    def _layer(self, layer: LayerCost, profile: ModelProfile, trainer: Trainer) -> LayerCost:
        element = ELEMENTS[profile.dtype]
        trained, bits = layer.gradient_bytes / element, QUANTIZED_BITS.get(self.weight_bits, 16.0)
        states, master = self.kept(trainer, layer.kind)
        held = trained * (states + (master if element == FLOAT16 else 0.0))
        moved = 2 * (layer.optimizer_bytes + layer.gradient_bytes)
        parameters = float(layer.parameter_bytes)
        if layer.kind == "decoder_block":
            frozen = max(parameters - layer.gradient_bytes, 0.0)
            parameters += frozen * (bits / 16 - 1)
        return replace(
            layer,
            parameter_bytes=round(parameters),
            optimizer_bytes=round(held),
            optimizer_seconds=layer.optimizer_seconds * (2 * (held + layer.gradient_bytes) / moved if moved else 1.0),
        )


USUAL: Final = TrainingPrecision()
"""AdamW in float32, with a float32 copy of 16-bit weights."""
