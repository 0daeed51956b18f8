"""DeepSpeed's PipelineModule with an explicit partition, a recompute level per layer and a token-weighted loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from omnibal.engine.resolve import Given
from omnibal.plan import Plan
from omnibal.ranks import gather, run_on_all_ranks
from omnibal.vlm.attention import sample_lengths
from omnibal.vlm.payload import PackCounts, Payload, note_counts
from omnibal.vlm.recompute import run_layer
from omnibal.vlm.weights import load_layer


class VlmPipelineModule(PipelineModule):
    """A vision-language model cut into pipeline stages; each process builds the layers of its own stage only.

    Weights are read by the first replica of each stage. Those of the others stay NaN until DeepSpeed's engine, when it
    is made, sends them the first one's parameters, as it does in any case: no file is read once per replica.

    Args:
        given: The model, and how it is trained.
        plan: Which layers each stage holds, a recompute level for each, and the pack limits that they count on.
    """

    def __init__(self, given: Given, plan: Plan) -> None:
        # DeepSpeed's constructor calls _partition_layers, when self is not yet an initialised nn.Module.
        self.__dict__["vlm"] = given.vlm
        self.__dict__["plan"] = plan
        self.__dict__["layout"] = given.layout
        super().__init__(
            layers=[_layer_spec(given, index) for index in range(len(given.vlm.records))],
            topology=PipeDataParallelTopology(num_pp=plan.num_stages, num_dp=given.layout.num_replicas),
            loss_fn=self._loss,
            dynamic_shape=True,
        )
        stages = gather((self.stage_id, any(parameter.requires_grad for parameter in self.parameters())))
        self.frozen_stages = min(stage for stage, trains in stages if trains)
        """How many of the first stages train nothing: they run forward only, and no gradient is sent to them."""
        self.placeholders = nn.ParameterList()
        """Parameters of no effect: in no layer, so in no checkpoint's layer files."""
        self._dtype = given.dtype
        if not _trains_its_own(self):
            self.add_placeholder()
        self.counts: PackCounts | None = None
        """Of the pack that ``forward`` gets next, where they are known."""
        self.before_layer: Callable[[int, Tensor], object] | None = None
        """Called with each layer's number in the stage and its hidden states, before it runs."""
        self.targets: Mapping[str, Tensor] = {}
        """On the last stage, of that pack: ``targets_of`` its labels."""

    def _partition_layers(self, method: str = "explicit") -> None:
        self.parts = list(self.plan.partition.boundaries)
        stage = self.layout.place(self.global_rank).stage
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Tied weights whose gradients are to be added up: frozen ones have none, and DeepSpeed would look for it."""
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]

    def _synchronize_tied_weights(self) -> None:
        # DeepSpeed broadcasts the parameter itself: outside no_grad torch would note a collective without a gradient in
        # its graph, and warn in the first backward pass.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def add_placeholder(self) -> nn.Parameter:
        """A new parameter of no effect, which DeepSpeed finds among those that this stage trains."""
        placeholder = nn.Parameter(torch.zeros(1, dtype=self._dtype))
        self.placeholders.append(placeholder)
        return placeholder

    def _build(self) -> None:
        # Weights that do not fit are found on one stage only; the others are told, or they would wait for it.
        run_on_all_ranks(super()._build, where=f"rank {self.global_rank}, stage {self.stage_id}")

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run this stage's layers on one micro-batch, from what a cut before them sends to what one behind sends."""
        note_counts(tensors, self.counts)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.stage_id >= self.frozen_stages):
            payload = self.vlm.layout(self._local_start).build(tensors)
            payload = self._run_layers(payload.with_integers(self.targets))
            if len(self.placeholders):
                payload = payload.with_floats(partial(_attached, placeholders=list(self.placeholders)))
        sent: tuple[Tensor, ...] = self.vlm.layout(self._local_stop).flatten(payload)
        return sent

    def _run_layers(self, payload: Payload) -> Payload:
        exceeds = self._exceeds_plan(payload)
        for place, layer in enumerate(self.forward_funcs):
            self._announce(place, payload)
            payload = run_layer(layer, payload, "full" if exceeds else self.plan.recompute[self._local_start + place])
        return payload

    def _announce(self, place: int, payload: Payload) -> None:
        if self.before_layer is not None:
            self.before_layer(place, payload.hidden)

    def _exceeds_plan(self, payload: Payload) -> bool:
        """Whether the pack is larger than the recompute levels were chosen for: one oversized sample.

        It then recomputes everything: slower than planned, where keeping more than planned might not fit.
        """
        in_language_model = self.vlm.records[self._local_start].module == "language"  # where tokens decide
        tiles = 0 if in_language_model else len(payload.hidden)
        limits = self.plan.limits
        return bool(payload.input_ids.shape[1] > limits.llm_tokens or tiles > max(limits.vision_units, 1))

    def count(self, batch: Mapping[str, Tensor]) -> PackCounts | None:
        """What layers need to know of a pack on the host, while it still is there."""
        image_tokens = int((batch["input_ids"] == self.vlm.config.image_token_id).sum())
        integers = {name: batch[name].tolist() for name in self.vlm.image_integers}
        return PackCounts(image_tokens, sample_lengths(batch["cu_seq_lens"]), integers)

    def _loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Weighted sum of token losses in training; EVALUATION_STATISTICS in evaluation.

        Args:
            outputs: What ``forward`` returns on the last stage, whose last layer has computed the loss.
            targets: The rows that predict them, their tokens, and the weight of one token's loss: with the weight
                ``micro_batches × num_replicas / target tokens of the step`` the engine's plain average over
                micro-batches and ranks is the average over the tokens of the step.
        """
        hidden: Tensor = self.vlm.layout(self._local_stop).build(outputs).hidden
        return hidden * targets[-1] if self.training else hidden


def _trains_its_own(module: nn.Module) -> bool:
    """Whether a stage trains a parameter that is not the copy of an earlier stage's.

    DeepSpeed leaves such copies out of the norm of gradients, which bf16's optimizer cannot take of none at all.
    """
    return any(
        parameter.requires_grad and not getattr(parameter, PIPE_REPLICATED, False) for parameter in module.parameters()
    )


def joined(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """One number whose backward pass is that of several outputs, all at once.

    Args:
        outputs: Of layers.
        gradients: Theirs.
    """
    number: Tensor = _Join.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return number


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        context.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *context.gradients


def _attached(sent: Tensor, placeholders: Sequence[nn.Parameter]) -> Tensor:
    attached: Tensor = _Attach.apply(sent, *placeholders)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Pass a tensor on unchanged, as if it depended on placeholders, whose gradients are zero.

    DeepSpeed's engine wants an optimizer on every stage and a backward pass through every stage's output. Behind the
    last layer of a stage this gives it both, and runs no layer backward that would not run otherwise.
    """

    @staticmethod
    def forward(context: Any, sent: Tensor, *placeholders: Tensor) -> Tensor:
        context.count = len(placeholders)
        return sent.view_as(sent)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient, *(gradient.new_zeros(1) for _ in range(context.count))


def _layer_spec(given: Given, index: int) -> Any:
    """What DeepSpeed builds a layer from, if it is in this process's stage."""
    key = given.vlm.records[index].tied_key
    return _Spec(given, index) if key is None else _TiedSpec(key, given, index)


class _Spec(LayerSpec):
    def __init__(self, given: Given, index: int) -> None:
        super().__init__(given.vlm.layer_class(index))
        self._given, self._index = given, index

    def build(self, log: bool = False) -> nn.Module:
        return _build(self._given, self._index)


class _TiedSpec(TiedLayerSpec):
    # No forward_fn: DeepSpeed wraps the module in a partial for it, which has no state_dict, and the layer would be
    # missing from checkpoints. The module itself tells its two uses apart by what it receives.
    def __init__(self, key: str, given: Given, index: int) -> None:
        layer_class: Any = given.vlm.layer_class(index)  # families say which weights are tied
        super().__init__(key, layer_class, tied_weight_attr=list(layer_class.tied_weights))
        self._given, self._index = given, index

    def build(self, log: bool = False) -> nn.Module:
        return _build(self._given, self._index)


def _build(given: Given, index: int) -> nn.Module:
    """A layer with initial weights, or with those that the first replica of its stage reads."""
    settings, source = given.section.model, given.source
    module = given.vlm.build_layer(index, seed=settings.seed if source is None else None, dtype=given.dtype)
    if source is not None:
        given.vlm.begin_adapters(index, module, seed=settings.seed)
    if source is not None and given.layout.place(dist.get_rank()).replica == 0:
        load_layer(given.vlm, index, module, source)
    assert module.state_dict().keys() == dict(module.named_parameters()).keys(), "DeepSpeed sends parameters only"
    record, names = given.vlm.records[index], given.vlm.weight_names(index)
    for name, parameter in module.named_parameters():
        if record.freezes(names[name], settings.frozen):
            parameter.requires_grad_(False)
    return module
