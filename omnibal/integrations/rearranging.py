"""Samples drawn at random are rearranged over ranks, for each encoder and for the LLM (OrchMLLM)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils.rnn import pad_sequence

from omnibal.cost import IntArray
from omnibal.dispatch.exchange import exchange
from omnibal.dispatch.step_plan import StepPlan
from omnibal.errors import ConfigError
from omnibal.formats.collate import IGNORED
from omnibal.packs.apart import TYPES, mask_images, rotate_by_sample
from omnibal.packs.collator import STATEFUL
from omnibal.packs.encoders import EncoderAdapter, device_and_dtype, encoders_of
from omnibal.packs.losses import loss_per_target
from omnibal.packs.proof import check_packed, two_texts
from omnibal.ranks import Meeting
from omnibal.ranks.failures import failures_reach_all_ranks


@dataclass(frozen=True)
class StepCheck:
    """The place of a micro-batch and the hash of its plan, which all ranks compare before they exchange its samples."""

    meeting: Meeting
    place: tuple[int, int]
    """Step, micro-batch; both from 0."""
    digest: int
    """Hash of the plan."""

    def compare(self, *, backward: bool) -> None:
        """Meet the other ranks before a pass, which costs log₂(ranks) small messages."""
        least, greatest = self.meeting.extremes(self.place, (int(backward), self.digest))
        *first, first_digest, first_rank = least
        *last, last_digest, last_rank = greatest
        if first != last:
            raise ConfigError(
                "all ranks must run the same pass, got "
                f"{_pass(*first)} on rank {first_rank} and {_pass(*last)} on rank {last_rank}; "
                "a rank that skips a step or catches an error, such as being out of memory, must not go on alone"
            )
        if first_digest != last_digest:
            raise ConfigError(
                f"all ranks must plan alike, got another plan of {_pass(*first)} on rank {last_rank} than on rank "
                f"{first_rank}; install the same versions of numpy, scipy and numba on all hosts"
            )

    def __str__(self) -> str:
        return "step {}, micro-batch {}".format(*self.place)


def _pass(step: int, micro_batch: int, backward: int) -> str:
    return f"the {'backward' if backward else 'forward'} pass of step {step}, micro-batch {micro_batch}"


@dataclass(frozen=True)
class Drawn:
    """A rank's samples of a micro-batch, as ``RearrangingLoader`` hands them to ``RearrangedModel``."""

    tokens: Tensor
    """Columns of ids, labels, types and positions of all tokens, sample after sample, (tokens, 3 + rows of
    positions)."""
    inputs: Mapping[str, Tensor]
    """Tensors that encoders take, sample after sample, under the same names on all ranks: with no rows on a rank
    without any; none where no rank has one. ``plan.sizes`` has each sample's rows by the same names."""
    plan: StepPlan
    check: StepCheck
    """Compares this micro-batch with those of the other ranks."""


def features_of(kind: str) -> str:
    """Name of the sizes that count a kind's features, beside a plan's own columns."""
    return f"{kind} features"


class RearrangedModel(nn.Module):
    """A model with encoders and an LLM whose ranks work on each other's samples.

    Give it to DistributedDataParallel, ``fully_shard`` or ``deepspeed.initialize`` in place of the model, and call it
    with what a ``RearrangingLoader`` yields. Inputs go to where their encoder is even, features from there to where the
    LLM is even, and text there too; gradients take the way back. Weights get the gradients that they get without it,
    but for the order of sums. A rank without an image encodes a blank one whose features count for nothing, so that all
    ranks run the same layers. If an encoder and what follows it are frozen, nothing goes back.

    A rank that fails tells the others: each says so and ends within seconds, where it would wait for the failed one.
    Before the forward and the backward pass of a micro-batch ranks compare its number and its plan: a rank that has
    skipped a step ends all with a message.

    Args:
        model: Packs by positions that restart, and takes what its encoders place: the models of ``encoders_of`` do.
        group: Of the ranks that share samples, as of the loader; by default all.
        encoders: Those of the loader; by default ``encoders_of(model)``.

    Raises:
        ConfigError: What ``encoders_of`` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        encoders: Mapping[str, EncoderAdapter] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._phases = Phases(model, model, encoders or encoders_of(model), group)
        config: Any = getattr(model, "config", None)
        if getattr(config, "model_type", None) in STATEFUL:
            check_packed(model, *two_texts(config))  # makes layers keep samples apart
        mask_images(model)
        rotate_by_sample(model)

    def forward(self, drawn: Drawn) -> Tensor:
        """This rank's part of the loss, () times the number of ranks: frameworks average gradients over ranks.

        Its mean over ranks, summed over a step's micro-batches, is the mean over all target tokens of the step.
        """
        return self._phases(drawn)


class Phases:
    """The forward pass of ``RearrangedModel``; ``forward`` computes the model's outputs once inputs are encoded."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        encoders: Mapping[str, EncoderAdapter],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self._forward, self._group, self._encoders = model, forward, group, encoders
        self._passes = Passes()

    def __call__(self, drawn: Drawn) -> Tensor:
        if (planned := drawn.plan.moves["llm"].num_ranks) != (num_ranks := dist.get_world_size(self._group)):
            raise ConfigError(f"group must be that of the loader, of {planned} ranks, got one of {num_ranks}")
        self._passes.begin_forward(drawn.check)  # raises on all ranks alike
        with failures_reach_all_ranks():
            loss = self._loss(drawn) * num_ranks
        self._passes.compare_backward(loss, drawn.check)
        return loss

    def _loss(self, drawn: Drawn) -> Tensor:
        # Three all-to-alls at most: inputs with text, features, and in the backward pass the features' gradients.
        plan, sizes = drawn.plan, drawn.plan.sizes
        tensors = {name: self._placed(tensor) for name, tensor in drawn.inputs.items()}  # none where no rank has any
        moves = {name: plan.moves[encoder.phase] for encoder in self._encoders.values() for name in encoder.takes}
        moves = {name: moves[name] for name in tensors} | {"tokens": plan.moves["llm"]}
        tensors["tokens"] = self._placed(drawn.tokens)
        inputs = exchange(tensors, {**sizes, "tokens": sizes["llm_tokens"]}, moves, self._group)
        tokens, encoded, begun = inputs.pop("tokens"), dict[str, Tensor](), set[str]()
        for kind, encoder in self._encoders.items():
            # A phase's first encoder always runs, for hosts wait for gradients of all parameters; a further one runs on
            # all ranks or on none.
            if encoder.phase not in begun or sizes[features_of(kind)].any():
                found = self._encode(encoder, {name: inputs[name] for name in encoder.takes if name in inputs})
                encoded |= {f"{kind}/{name}": value for name, value in found.items()}
            begun.add(encoder.phase)
        kinds = {name: name.partition("/")[0] for name in encoded}
        rows = {name: sizes[features_of(kind)] for name, kind in kinds.items()}
        ways = {name: plan.features[self._encoders[kind].phase] for name, kind in kinds.items()}
        return self._language(tokens, exchange(encoded, rows, ways, self._group), plan)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Bring a tensor to the model's device, and floats to its precision, which is less to send than 32 bits."""
        device, dtype = device_and_dtype(self.model)
        # A copy from pinned memory that converts would convert on the processor, into memory that is not pinned.
        tensor = tensor.to(device, non_blocking=True)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _encode(self, encoder: EncoderAdapter, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if len(inputs.get(encoder.takes[0], ())):
            return dict(encoder.encode(inputs))
        blank = {name: self._placed(tensor) for name, tensor in encoder.blank().items()}
        return {name: value[:0] + 0 * value.sum() for name, value in encoder.encode(blank).items()}

    def _language(self, tokens: Tensor, features: Mapping[str, Tensor], plan: StepPlan) -> Tensor:
        sizes = plan.sizes["llm_tokens"][plan.moves["llm"].brought_to(dist.get_rank(self._group))]
        if len(tokens) == 0:  # no sample came here: one token that predicts nothing
            tokens, sizes = tokens.new_zeros((1, tokens.shape[1])), np.ones(1, dtype=np.int64)
            tokens[:, 1] = IGNORED
        arguments, labels = self._rows(tokens, sizes) if plan.costs.llm.method == "padded" else self._pack(tokens)
        for kind, encoder in self._encoders.items():
            own = f"{kind}/"
            of_kind = {name.removeprefix(own): value for name, value in features.items() if name.startswith(own)}
            if any(len(value) for value in of_kind.values()):
                arguments = encoder.insert(arguments, of_kind)
        outputs = self._forward(**arguments)
        loss = loss_per_target(outputs, labels, plan.total_targets)
        # All ranks must call the backward all-to-all, also a rank that uses none of its features.
        return loss + sum(0 * value.sum() for value in features.values())

    def _rows(self, tokens: Tensor, sizes: IntArray) -> tuple[dict[str, Any], Tensor]:
        """Samples as rows, padded behind to the longest, and the labels of the rows."""
        rows = pad_sequence([*torch.split(tokens, sizes.tolist())], batch_first=True)  # (samples, longest, columns)
        mask = torch.arange(rows.shape[1], device=rows.device) < torch.tensor(sizes, device=rows.device)[:, None]
        ids, labels, types, *positions = rows.unbind(dim=-1)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        arguments |= self._named(types)
        if positions:
            arguments["position_ids"] = torch.stack(positions)
        return arguments, labels.masked_fill(~mask, IGNORED)

    def _pack(self, tokens: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Samples one after another in one row, and the labels of the row."""
        ids, labels, types, *positions = tokens.T
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if len(positions) > 1:  # these say all that types do
            return arguments | {"position_ids": torch.stack(positions)[:, None]}, labels[None]
        return arguments | {"position_ids": positions[0][None]} | self._named(types[None]), labels[None]

    def _named(self, types: Tensor) -> dict[str, Tensor]:
        """Types of tokens under the name that the model takes, if it takes any."""
        takes = signature(self.model.forward).parameters
        return {name: types for name in TYPES if name in takes}


class Passes:
    """Follows the passes of a model on this rank, and compares each with those of the other ranks before it begins."""

    _unfinished: StepCheck | None = None

    def begin_forward(self, check: StepCheck) -> None:
        if self._unfinished is not None:
            with failures_reach_all_ranks():
                raise ConfigError(
                    f"each backward pass must end, got an error in that of {self._unfinished} which was caught; the "
                    "other ranks wait for the rest of it: let the error end the run"
                )
        check.compare(backward=False)

    def compare_backward(self, loss: Tensor, check: StepCheck) -> None:
        if not loss.requires_grad:
            return

        def begin(_: Tensor) -> None:
            check.compare(backward=True)
            self._unfinished = check
            # Autograd calls this at the end of the whole backward pass, and not if the pass fails.
            Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._unfinished = None

        # A tensor's hook runs before the backward pass goes on to what the tensor was computed from.
        loss.register_hook(begin)  # type: ignore[no-untyped-call]
