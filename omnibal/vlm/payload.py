"""What travels through a model's layers, by name and as the tensors that an engine sends, and how a layer runs on it.

A run repeats in its backward pass what the recompute level says, and weight gradients may wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from omnibal.profile.records import Level


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
    """Which tensors of a payload pass a cut between two layers, in the order in which they are sent."""

    # Hidden states come first, then features, then integers, ``cu_seq_lens`` last, where ``counts_of`` finds them.

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


# Operators whose results "selective" keeps: matrix products and attention, nearly all of the work.
_EXPENSIVE = {
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
} | {"torch_attn::_varlen_attn"}


def run_layer(layer: nn.Module, payload: Payload, level: Level) -> Payload:
    """Run a layer forward, keeping for its backward pass what the level says; the same bits at every level."""
    # ``"none"`` keeps all that autograd saves, ``"selective"`` the input and the results of matrix products and
    # attention, ``"full"`` the input alone.
    # A layer that computes its gradients in the forward pass (``at_once``) keeps them at every level: recomputing would
    # compute them twice.
    if level == "none" or getattr(layer, "at_once", False) or not torch.is_grad_enabled():
        return layer(payload)  # type: ignore[no-any-return]
    options: dict[str, Any] = {}
    if level == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # checkpoint sees only tensors that are arguments themselves: inside a record their gradients would be lost.
    layout = SentTensors.of(payload)
    # Of the input of a block that tensor ranks share this rank's tokens are kept.
    restored, tokens = None, getattr(layer, "shared_tokens", None)
    if tokens is not None:
        own, restored = tokens.kept_part(payload.hidden)
        payload = payload.replace(hidden=own)
    return checkpoint(_run_tensors, layer, layout, restored, *layout.flatten(payload), use_reentrant=False, **options)  # type: ignore[no-any-return]


def _run_tensors(
    layer: nn.Module, layout: SentTensors, restored: Callable[[Tensor], Tensor] | None, *tensors: Tensor
) -> Payload:
    payload = layout.build(tensors)
    if restored is not None:
        payload = payload.replace(hidden=restored(payload.hidden))
    return layer(payload)  # type: ignore[no-any-return]


def _policy(context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operator.name().split(".")[0] in _EXPENSIVE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# Adds the gradient of one micro-batch to the sum over micro-batches.
Accumulate = Callable[[nn.Parameter, Tensor], None]


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class WeightGradients:
    """Weight gradients that wait for their turn, in the order in which backward passes deferred them."""

    # Those that wait keep at most ``budget_bytes``; None is no limit, and with 0 none waits.

    def __init__(self, *, budget_bytes: int | None = None, accumulate: Accumulate = add_gradient) -> None:
        self.budget_bytes = budget_bytes
        self.accumulate = accumulate
        self.micro_batch = 0  # the one whose backward pass is running
        self.pending_bytes = 0  # kept for gradients that wait; a storage that several of them need counts once
        self.peak_bytes = 0  # the largest ``pending_bytes`` so far
        self._jobs: deque[_Job] = deque()
        self._users: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def defer(self, work: Callable[[], object], keeps: Sequence[Tensor] = ()) -> None:
        """Queue ``work``, which computes a gradient of ``micro_batch`` and keeps the tensors ``keeps`` alive."""
        storages = [(storage._cdata, storage.nbytes()) for storage in map(Tensor.untyped_storage, keeps)]
        for address, size in storages:
            self.pending_bytes += 0 if self._users[address] else size
            self._users[address] += 1
        self._jobs.append(_Job(self.micro_batch, work, storages))
        budget = self.budget_bytes
        while self._jobs and budget is not None and (budget == 0 or self.pending_bytes > budget):
            self._run_oldest()
        self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def run(self, micro_batch: int) -> None:
        """Compute the waiting gradients of all micro-batches up to this one."""
        while self._jobs and self._jobs[0].micro_batch <= micro_batch:
            self._run_oldest()

    def _run_oldest(self) -> None:
        # Always the oldest first, so that sums of gradients are the same bits as without waiting.
        job = self._jobs.popleft()
        with torch.no_grad():
            job.work()
        for address, size in job.storages:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self.pending_bytes -= size


class _Job(NamedTuple):
    micro_batch: int
    work: Callable[[], object]
    storages: list[tuple[int, int]]


class DeferringLinear(nn.Linear):
    """A linear layer whose weight gradient is deferred; outputs and all gradients are the bits of ``nn.Linear``."""

    weight_gradients: WeightGradients | None = None  # without a queue nothing is deferred

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.bias)

    def product(self, input: Tensor, own_bias: Tensor | None) -> Tensor:
        # Autograd computes the gradients of input and bias in the backward pass. If neither is wanted, the weight's
        # gradient is computed there, too: nothing would be gained by deferring it.
        # Bits equal to nn.Linear's: it flattens its input to rows if the weight requires a gradient, and fuses the bias
        # into the product (addmm) only if flattening needs no copy.
        bias = own_bias if input.dim() == 2 or input.is_contiguous() else None
        others_wanted = input.requires_grad or (bias is not None and bias.requires_grad)
        queue = self.weight_gradients
        if queue is None or not (torch.is_grad_enabled() and self.weight.requires_grad and others_wanted):
            return functional.linear(input, self.weight, own_bias)
        rows = input.reshape(-1, self.in_features)
        # A list holds _Keep's empty output, not only its node: before torch 2.13 a node's saved tensors are freed
        # together with its output.
        kept = [_Keep.apply(rows, self.weight)]  # type: ignore[no-untyped-call]
        output = functional.linear(rows, self.weight.detach(), bias)
        # The hook gets the output's gradient, the second factor, as soon as the backward pass has it.
        output.register_hook(partial(_defer, self, queue, kept))  # type: ignore[no-untyped-call]
        output = output.view(*input.shape[:-1], self.out_features)
        return output if bias is own_bias or own_bias is None else output + own_bias


class _Keep(torch.autograd.Function):
    """Saves the rows through autograd, so that recomputation and its hooks treat them like any saved tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: nn.Parameter) -> Tensor:
        # Before the product is computed, as autograd's own linear does: recomputation stops when it has every saved
        # tensor, and a product at the end of a layer need not be computed again.
        ctx.save_for_backward(rows)
        return rows.new_empty(0)


def _defer(layer: DeferringLinear, queue: WeightGradients, kept: list[Tensor], gradient: Tensor) -> None:
    # Pop the last reference: else the rows would live as long as the graph.
    keep = kept.pop()
    (rows,) = cast(Any, keep.grad_fn).saved_tensors
    rows = rows.detach()  # the rows' graph holds the stage's input and its gradient
    queue.defer(partial(_run, layer, queue, rows, gradient), keeps=(rows, gradient))


def _run(layer: DeferringLinear, queue: WeightGradients, rows: Tensor, gradient: Tensor) -> None:
    # weight gradient = gradientᵀ · rows. No addmm onto the sum: in bfloat16 autograd rounds the product, then adds it.
    # ``layer.weight`` and no saved weight: recomputation returns saved parameters as other tensors.
    queue.accumulate(cast(nn.Parameter, layer.weight), gradient.t().mm(rows))


def defer_linears(module: nn.Module, queue: WeightGradients) -> None:
    """Let every ``nn.Linear`` of a module defer its weight gradient to a queue; names of parameters stay."""
    # Subclasses of nn.Linear may compute otherwise and are left alone, and so are layers in a module with ``at_once``.
    # Each layer must be called once per micro-batch: autograd would first add the gradients of several calls to each
    # other, in another order of additions.
    at_once = {inner for part in module.modules() if getattr(part, "at_once", False) for inner in part.modules()}
    for layer in module.modules():
        if type(layer) is nn.Linear and layer not in at_once:
            layer.__class__ = DeferringLinear
        if isinstance(layer, DeferringLinear) and layer not in at_once:
            layer.weight_gradients = queue
