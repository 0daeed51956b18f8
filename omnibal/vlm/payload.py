"""What travels through the layers of a model, by name, and as the tuple of tensors that a pipeline engine sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Payload:
    """What every layer takes and returns. A layer changes what it names: ``payload.replace(hidden=...)``.

    Attributes:
        hidden: Pixels (tiles, channels, height, width) at first, (tiles, patches, width) within the ViT, for a
            native-resolution ViT (patches, values) and (patches, width); (image_tokens, width) out of the projector,
            (1, tokens, width) within the language model; of the last layer the sum of losses, a number.
        integers: What says how to read the floats, from the data; no layer changes it, and it has no gradient. On the
            last stage also what ``omnibal.loss.targets_of`` makes of labels.
        features: Further floats that later layers read, such as those of earlier ViT blocks. A stage that receives one
            sends a gradient back for it.
    """

    hidden: Tensor
    integers: Mapping[str, Tensor]
    features: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_pack(cls, pack: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Payload:
        """The input of the first layer.

        Args:
            pack: What ``pack_samples`` returns; its labels are left behind, since later stages have their own.
            dtype: Of the pixels.
        """
        integers = {name: tensor for name, tensor in pack.items() if name not in ("pixel_values", "labels")}
        return cls(pack["pixel_values"].to(dtype), integers)

    def replace(self, **changes: Any) -> Payload:
        """The same with other values of the attributes that are named."""
        return replace(self, **changes)

    def with_integers(self, more: Mapping[str, Tensor]) -> Payload:
        """The same with further integers."""
        return replace(self, integers={**self.integers, **more})

    def with_floats(self, change: Callable[[Tensor], Tensor]) -> Payload:
        """The same with ``change`` of the hidden states and of each feature in their places."""
        return replace(
            self,
            hidden=change(self.hidden),
            features={name: change(feature) for name, feature in self.features.items()},
        )

    @property
    def input_ids(self) -> Tensor:
        """Int64 of shape (1, tokens)."""
        return self.integers["input_ids"]

    @property
    def position_ids(self) -> Tensor:
        """Int64 of shape (1, tokens), or (3, 1, tokens) in time, height and width; they restart with each sample."""
        return self.integers["position_ids"]

    def on_host(self, name: str) -> list[Any]:
        """The integers of a name as a (nested) list; what is noted of the pack, else the device is asked."""
        counts = counts_of([self.cu_seq_lens])
        known = None if counts is None else counts.integers.get(name)
        return self.integers[name].tolist() if known is None else list(known)

    @property
    def cu_seq_lens(self) -> Tensor:
        """Bounds of the samples, int32 of shape (samples + 1,)."""
        return self.integers["cu_seq_lens"]


@dataclass(frozen=True)
class Layout:
    """Which tensors a payload has between two layers, in the order in which they are sent.

    A pipeline engine sends tuples of tensors, and wants the same number and dtypes of them for every micro-batch at a
    cut: the hidden states, other floats, then integers. Features that no later layer reads are not in the layout of a
    cut, and so not sent: the stage behind it would owe gradients for them. The samples' bounds come last, where
    ``counts_of`` finds them.

    Attributes:
        features: Names of the features.
        integers: Names of the integers, ``"cu_seq_lens"`` last.
    """

    features: tuple[str, ...] = ()
    integers: tuple[str, ...] = ("input_ids", "position_ids", "cu_seq_lens")

    @classmethod
    def of(cls, payload: Payload) -> Layout:
        """Of all that a payload has."""
        others = [name for name in payload.integers if name != "cu_seq_lens"]
        return cls(tuple(payload.features), (*others, "cu_seq_lens"))

    def flatten(self, payload: Payload) -> tuple[Tensor, ...]:
        """A payload as a tuple of tensors: of those it has, the ones in the layout."""
        return (*self.floats(payload), *(payload.integers[name] for name in self.integers))

    def floats(self, payload: Payload) -> tuple[Tensor, ...]:
        """The first of them: hidden states and features."""
        return (payload.hidden, *(payload.features[name] for name in self.features))

    def build(self, tensors: Sequence[Tensor]) -> Payload:
        """The payload whose tuple of tensors this is."""
        hidden, *others = tensors
        assert len(others) == len(self.features) + len(self.integers), "the layout says which tensors there are"
        features, integers = others[: len(self.features)], others[len(self.features) :]
        return Payload(
            hidden, dict(zip(self.integers, integers, strict=True)), dict(zip(self.features, features, strict=True))
        )


class PackCounts(NamedTuple):
    """What the host knows of a pack, so that no layer asks the device, which would have to catch up with it first.

    Attributes:
        image_tokens: In the pack; None where nobody has counted them.
        sample_lengths: Tokens of each sample.
        integers: Further ones of the pack's integers, such as the sizes of its images.
    """

    image_tokens: int | None
    sample_lengths: tuple[int, ...]
    integers: Mapping[str, list[Any]] = MappingProxyType({})


def note_counts(tensors: Sequence[Tensor], counts: PackCounts | None) -> None:
    """Keep a pack's counts with its tensors: on the last one, the samples' bounds, which all layers hand on."""
    if counts is not None:
        tensors[-1]._omnibal_counts = counts  # type: ignore[attr-defined]


def counts_of(tensors: Sequence[Tensor]) -> PackCounts | None:
    """The counts that are noted of a pack; None if there are none."""
    counts: PackCounts | None = getattr(tensors[-1], "_omnibal_counts", None)
    return counts
