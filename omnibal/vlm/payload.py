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
    """What every layer takes and returns; a layer changes only what it names: ``payload.replace(hidden=...)``.

    Attributes:
        hidden: Pixels (tiles, channels, height, width) first, then (tiles, patches, width) within the ViT, or
            (patches, values) and (patches, width) for a native-resolution ViT; (image_tokens, width) behind the
            projector; (1, tokens, width) within the language model; the sum of losses, a number, behind the last layer.
        integers: Integers of the pack by name, such as token ids and sizes of images. They have no gradient, and no
            layer changes them. On the last stage the results of ``omnibal.loss.targets_of`` are among them.
        features: Further floats that later layers read, such as outputs of earlier ViT blocks.
    """

    hidden: Tensor
    integers: Mapping[str, Tensor]
    features: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_pack(cls, pack: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Payload:
        """The input of the first layer, with pixels in ``dtype``, from a pack of ``pack_samples``."""
        # Labels stay behind: the last stage reads its own.
        integers = {name: tensor for name, tensor in pack.items() if name not in ("pixel_values", "labels")}
        return cls(pack["pixel_values"].to(dtype), integers)

    def replace(self, **changes: Any) -> Payload:
        return replace(self, **changes)

    def with_integers(self, more: Mapping[str, Tensor]) -> Payload:
        return replace(self, integers={**self.integers, **more})

    def with_floats(self, change: Callable[[Tensor], Tensor]) -> Payload:
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
        """The integers of a name as a (nested) list: from the noted counts, else read from the device."""
        # Reading from a GPU would make the host wait for all that is queued there.
        counts = counts_of([self.cu_seq_lens])
        known = None if counts is None else counts.integers.get(name)
        return self.integers[name].tolist() if known is None else list(known)

    @property
    def cu_seq_lens(self) -> Tensor:
        """Bounds of the samples, int32 of shape (samples + 1,)."""
        return self.integers["cu_seq_lens"]


@dataclass(frozen=True)
class SentTensors:
    """Which tensors of a payload pass a cut between two layers, in the order in which they are sent.

    Hidden states come first, then features, then integers, ``cu_seq_lens`` last, where ``counts_of`` finds them.
    """

    # DeepSpeed wants the same number and dtypes of tensors for every micro-batch at a cut. Features that no later layer
    # reads are not sent: the stage behind the cut would owe gradients for them.
    features: tuple[str, ...] = ()
    integers: tuple[str, ...] = ("input_ids", "position_ids", "cu_seq_lens")

    @classmethod
    def of(cls, payload: Payload) -> SentTensors:
        others = [name for name in payload.integers if name != "cu_seq_lens"]
        return cls(tuple(payload.features), (*others, "cu_seq_lens"))

    def flatten(self, payload: Payload) -> tuple[Tensor, ...]:
        return (*self.floats(payload), *(payload.integers[name] for name in self.integers))

    def floats(self, payload: Payload) -> tuple[Tensor, ...]:
        """The floats among `flatten`: hidden states, then features."""
        return (payload.hidden, *(payload.features[name] for name in self.features))

    def build(self, tensors: Sequence[Tensor]) -> Payload:
        hidden, *others = tensors
        assert len(others) == len(self.features) + len(self.integers), "the layout says which tensors there are"
        features, integers = others[: len(self.features)], others[len(self.features) :]
        return Payload(
            hidden, dict(zip(self.integers, integers, strict=True)), dict(zip(self.features, features, strict=True))
        )


class PackCounts(NamedTuple):
    """Numbers of a pack that the host knows: a layer that read them from the device would wait for its queue."""

    image_tokens: int | None  # in the pack; None if nobody has counted them
    sample_lengths: tuple[int, ...]
    # Further integers of the pack by name, such as the sizes of its images:
    integers: Mapping[str, list[Any]] = MappingProxyType({})


def note_counts(tensors: Sequence[Tensor], counts: PackCounts | None) -> None:
    """Attach a pack's counts to the last of its tensors, the samples' bounds, which all layers hand on."""
    if counts is not None:
        # An attribute of the tensor object, which the layers of a stage hand on as it is.
        tensors[-1]._omnibal_counts = counts  # type: ignore[attr-defined]


def counts_of(tensors: Sequence[Tensor]) -> PackCounts | None:
    """The counts that `note_counts` attached; None if there are none."""
    counts: PackCounts | None = getattr(tensors[-1], "_omnibal_counts", None)
    return counts
