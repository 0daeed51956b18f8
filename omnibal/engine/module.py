"""DeepSpeed's PipelineModule with an explicit partition, a recompute level per layer and a token-weighted loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.constants import PIPE_REPLICATED
from torch import Tensor, nn

from omnibal.config.section import OptimizerSection
from omnibal.engine.checkpoint import layer_files
from omnibal.engine.grid import topology_of, unequal_grids
from omnibal.engine.resolve import ParameterGroup, ResolvedRun, Weights
from omnibal.families.base import Module, encoder_layers
from omnibal.plan import Plan
from omnibal.ranks import gather, run_on_all_ranks
from omnibal.vlm.attention import sample_lengths
from omnibal.vlm.payload import PackCounts, Payload, note_counts, run_layer
from omnibal.vlm.tensor import COUNTED, TensorGroup, share_layer
from omnibal.vlm.weights import load_layer, own_state

PLACEHOLDER: Final = "placeholder"  # in place of a name on disk
ON_ALL_RANKS: Final = "on_all_ranks"  # key of parameter groups whose parameters are those of a spread encoder


class VlmPipelineModule(PipelineModule):
    """A vision-language model cut into pipeline stages; each process builds the layers of its own stage only.

    ``frozen_stages`` is the number of the first stages that train nothing: they run forward only, and no gradient is
    sent to them. ``placeholders`` are parameters of no effect, which stand in no layer and so in no checkpoint.
    ``encoder`` are the layers of an encoder that is spread, whole on every rank: the pipeline begins behind them.
    """

    def __init__(self, resolved: ResolvedRun, plan: Plan, weights: Weights | None = None) -> None:
        # PipelineModule.__init__ calls _partition_layers and _build, when nothing else of self is there yet.
        self.__dict__["vlm"] = resolved.vlm
        self.__dict__["plan"] = plan
        self.__dict__["layout"] = resolved.layout
        # PipelineModule keeps the specs, which hold this reader: it lets go of weights in memory when layers are built.
        # It makes the groups of each stage's replicas and each replica's stages, then builds this stage's layers.
        reader = self.__dict__["reader"] = _LayerReader(resolved, weights)
        with unequal_grids() if resolved.layout.has_units else nullcontext():
            super().__init__(
                layers=[_layer_spec(reader, index) for index in range(len(resolved.vlm.records))],
                topology=topology_of(resolved.layout),
                loss_fn=self._loss,
                dynamic_shape=True,  # packs differ in length: without it DeepSpeed keeps the first one's shapes
            )
        spread = range(encoder_layers(resolved.vlm.records)) if resolved.layout.is_spread else range(0)
        self.encoder = nn.ModuleList(run_on_all_ranks(lambda: [reader.build(index) for index in spread]))
        reader.weights = None
        # With a spread encoder that trains no stage is frozen: its gradients come out of the first stage.
        stages = gather((self.stage_id, any(parameter.requires_grad for parameter in self.parameters())))
        self.frozen_stages = min(stage for stage, trains in stages if trains)
        self.placeholders = nn.ParameterList()
        self.dtype = resolved.dtype
        # Every rank needs a parameter to train that counts in the gradient norm: PipelineEngine asserts that it has an
        # optimizer, and BF16_Optimizer cannot take the norm of no gradient. It leaves out copies of an earlier stage's
        # parameters, and on all tensor ranks but the first what is whole on each of them.
        own = (p for p in self.parameters() if self.ranks.rank == 0 or getattr(p, COUNTED, False))
        if not any(p.requires_grad and not getattr(p, PIPE_REPLICATED, False) for p in own):
            self._add_placeholder()
        # The engine sets these: of the pack that forward gets next, counts (if they are known) and, on the last stage,
        # targets_of its labels; and once what is called with a layer's number among numbered_layers and hidden states
        # before the layer runs.
        self.counts: PackCounts | None = None
        self.targets: Mapping[str, Tensor] = {}
        self.before_layer: Callable[[int, Tensor], object] | None = None

    def _partition_layers(self, method: str = "explicit") -> None:
        # PipelineModule's own balances by parameters. It leaves self.parts, which checkpoints and the topology read.
        self.parts = list(self.plan.partition.boundaries)
        stage = self.layout.position(self.global_rank).stage
        first = encoder_layers(self.vlm.records) if self.layout.is_spread else 0
        self._set_bounds(start=max(first, self.parts[stage]), stop=self.parts[stage + 1])

    def _index_tied_modules(self) -> dict[str, Any]:
        # PipelineModule's own lets every rank make as many groups as its own stage has replicas. Ties of units lie
        # within a stage (resolve.check_run), where no gradients need to be added up.
        return {} if self.layout.has_units else super()._index_tied_modules()

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        # PipelineEngine._exec_reduce_tied_grads adds up the gradients of these; frozen weights have none.
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad]

    def _synchronize_tied_weights(self) -> None:
        # PipelineModule broadcasts the parameter itself: outside no_grad torch would note a collective without a
        # gradient in its graph, and warn in the first backward pass.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def _add_placeholder(self) -> nn.Parameter:
        placeholder = nn.Parameter(torch.zeros(1, dtype=self.dtype))
        setattr(placeholder, COUNTED, True)  # on each tensor rank: its gradient is zero
        self.placeholders.append(placeholder)
        return placeholder

    def parameter_groups(self, settings: OptimizerSection) -> list[ParameterGroup]:
        """The parameters that this rank trains, apart where the section treats them differently.

        A group has a ``name``, ``params``, ``names`` (the parameters' names on disk), ``lr`` and ``weight_decay`` where
        the section decides them, and ``on_all_ranks`` where it is of a spread encoder.
        """
        named, unused = self.disk_names(), list(self.placeholders)
        own: dict[_GroupKey, dict[nn.Parameter, str]] = {}
        spread = set(self.encoder.parameters())
        for parameter in self.parameters():
            if parameter.requires_grad and parameter in named:
                name, part = named[parameter]
                has_rate = getattr(settings.learning_rates, part) is not None
                undecayed = settings.weight_decay != "all" and parameter.dim() <= 1
                key = _GroupKey(part if has_rate else "", undecayed, parameter in spread)
                own.setdefault(key, {})[parameter] = name
        # All stages make the same groups in the same order: under ZeRO they meet once for the norm of each group. The
        # order is that of the keys, whatever the layout: schedules keep a value for each group by its position.
        # Where a stage trains nothing of a group, it has a placeholder there.
        of_all_stages = sorted({key for of_rank in gather(list(own)) for key in of_rank})
        for key in of_all_stages:
            if key not in own:
                own[key] = {unused.pop() if unused else self._add_placeholder(): PLACEHOLDER}
        for placeholder in unused:  # of a stage whose own parameters are all copies of an earlier stage's
            own[of_all_stages[0]][placeholder] = PLACEHOLDER
        return [
            {"name": key.name, "params": [*own[key]], "names": [*own[key].values()], **key.overrides(settings)}
            for key in of_all_stages
        ]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Names on disk and gradients of a step, added up over replicas and tied layers, and not yet clipped."""
        # Under ZeRO or bfloat16 a gradient is a float32 copy, which all replicas of a stage make together: each keeps a
        # part.
        for parameter, (name, _) in self.disk_names().items():
            # DeepSpeed's optimizers give their parameters this method (mixed_precision_linkage.link_hp_params).
            if hasattr(parameter, "get_full_hp_grad"):
                yield name, parameter.get_full_hp_grad()
            elif parameter.grad is not None:
                yield name, parameter.grad

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers of this rank with their numbers in the model: a spread encoder's, then its stage's."""
        yield from enumerate(self.encoder)
        # PipelineModule keeps its stage's layers in forward_funcs; _local_start is the number of the first one.
        yield from enumerate(self.forward_funcs, start=self._local_start)

    def disk_names(self) -> dict[nn.Parameter, tuple[str, Module]]:
        """Name on disk and module of this rank's parameters; of a tied one, those of its first use."""
        found: dict[nn.Parameter, tuple[str, Module]] = {}
        for index, layer in self.numbered_layers():
            names = self.vlm.weight_names(index)
            for name, parameter in layer.named_parameters():
                found.setdefault(parameter, (names[name], self.vlm.records[index].module))
        return found

    @property
    def ranks(self) -> TensorGroup:
        grid = self._grid  # made before layers are built
        return TensorGroup(
            grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size(), grid.get_slice_parallel_group()
        )

    def _build(self) -> None:
        self.reader.ranks = self.ranks
        # Weights that do not fit are found on one stage only; the others are told, or they would wait for it.
        run_on_all_ranks(super()._build, where=f"rank {self.global_rank}, stage {self.stage_id}")

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run this stage's layers on one micro-batch, from what a cut before them sends to what one behind sends."""
        note_counts(tensors, self.counts)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.stage_id >= self.frozen_stages):
            payload = self.vlm.sent_tensors(self._local_start).build(tensors)
            payload = self._run_layers(payload.with_integers(self.targets))
            if len(self.placeholders):
                attached: Any = Attached
                payload = payload.with_floats(lambda sent: attached.apply(sent, *self.placeholders))
        sent: tuple[Tensor, ...] = self.vlm.sent_tensors(self._local_stop).flatten(payload)
        return sent

    def encode(self, payload: Payload) -> Payload:
        for index, layer in enumerate(self.encoder):
            self._announce(index, payload)
            payload = run_layer(layer, payload, self.plan.recompute[index])
        return payload

    def _run_layers(self, payload: Payload) -> Payload:
        # A pack of one oversized sample may be larger than the recompute levels were chosen for.
        in_language_model = self.vlm.records[self._local_start].module == "language"  # where tokens decide
        limits, tiles = self.plan.limits, 0 if in_language_model else len(payload.hidden)
        exceeds = payload.input_ids.shape[1] > limits.llm_tokens or tiles > max(limits.vision_units, 1)
        before = len(self.encoder)
        for index, layer in enumerate(self.forward_funcs):
            self._announce(before + index, payload)
            payload = run_layer(layer, payload, "full" if exceeds else self.plan.recompute[self._local_start + index])
        return payload

    def save_state_dict(self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
        super().save_state_dict(save_dir, checkpoint_engine, exclude_frozen_params)
        # PipelineModule knows its stage's layers only; all ranks write the spread encoder's in turns.
        for index in range(self.global_rank, len(self.encoder), dist.get_world_size()):
            state = self.encoder[index].state_dict()
            for name in self._get_frozen_parameter_names(self.encoder[index]) if exclude_frozen_params else ():
                del state[name]
            # PipelineModule names a layer's file by its number in the stage, to which it adds _local_start again.
            path = self.ckpt_layer_path(save_dir, index - int(self._local_start))
            checkpoint_engine.save(state_dict=clone_tensors_for_torch_save(state), path=path)

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
        # PipelineModule knows its stage's layers only, from a checkpoint of as many tensor ranks.
        opened = partial(checkpoint_engine.load, map_location="cpu")
        for index, layer in self.numbered_layers():
            layer.load_state_dict(self.saved_state(Path(load_dir), index, opened), strict=strict)
        self._synchronize_tied_weights()

    def saved_state(
        self, checkpoint: Path, index: int, opened: Callable[[Path], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """What a checkpoint of any number of tensor ranks holds of a layer, as this rank has it."""
        files, ranks = layer_files(checkpoint, index), self.ranks
        if len(files) == ranks.size:
            return opened(files[ranks.rank])
        return own_state(self.vlm, index, [opened(path) for path in files], ranks)

    def _announce(self, layer: int, payload: Payload) -> None:
        if self.before_layer is not None:
            self.before_layer(layer, payload.hidden)

    def count(self, batch: Mapping[str, Tensor]) -> PackCounts | None:
        image_tokens = int((batch["input_ids"] == self.vlm.config.image_token_id).sum())
        integers = {name: batch[name].tolist() for name in self.vlm.image_integers}
        return PackCounts(image_tokens, sample_lengths(batch["cu_seq_lens"]), integers)

    def _loss(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Weighted sum of token losses in training, EVALUATION_STATISTICS in evaluation, both from the last layer."""
        # The last target is the weight of one token's loss: with `micro_batches × num_replicas / target tokens of the
        # step` DeepSpeed's plain average over micro-batches and replicas is the average over the tokens of the step.
        hidden: Tensor = self.vlm.sent_tensors(self._local_stop).build(outputs).hidden
        return hidden * targets[-1] if self.training else hidden


def grouping(settings: OptimizerSection) -> str | None:
    """What parameter groups keep apart, in words; None where all parameters are treated alike."""
    apart = ["weight decay of matrices"] if settings.weight_decay == "matrices" else []
    apart += [f"learning rate of {module}" for module, rate in settings.learning_rates if rate is not None]
    return ", ".join(apart) or None


class _GroupKey(NamedTuple):
    """What keeps a parameter group apart from others, whatever the layout and the values of settings."""

    part: str  # the module that has a learning rate of its own; empty for the other modules together
    is_undecayed: bool
    on_all_ranks: bool

    @property
    def name(self) -> str:
        more = ("without weight decay",) * self.is_undecayed + ("on all ranks",) * self.on_all_ranks
        return ", ".join((self.part or "parameters", *more))

    def overrides(self, settings: OptimizerSection) -> dict[str, float]:
        """The settings of the group that differ from the optimizer's own."""
        rate = {"lr": getattr(settings.learning_rates, self.part)} if self.part else {}
        decay = {"weight_decay": 0.0} if self.is_undecayed else {}
        return {**rate, **decay, **({ON_ALL_RANKS: True} if self.on_all_ranks else {})}


class Joined(torch.autograd.Function):
    """One number whose backward pass is that of several outputs with given gradients, all at once."""

    @staticmethod
    def forward(context: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        context.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *context.gradients


class Attached(torch.autograd.Function):
    """Pass a tensor on unchanged, as if it depended on placeholders, whose gradients are zero."""

    # PipelineEngine._exec_backward_pass runs backward through every stage's output. Behind the last layer of a stage
    # whose layers need no gradient this makes that possible, and runs no layer backward that would not run otherwise.

    @staticmethod
    def forward(context: Any, sent: Tensor, *placeholders: Tensor) -> Tensor:
        context.count = len(placeholders)
        return sent.view_as(sent)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient, *(gradient.new_zeros(1) for _ in range(context.count))


class _LayerReader:
    def __init__(self, resolved: ResolvedRun, weights: Weights | None) -> None:
        self.resolved, self.weights = resolved, weights
        self.ranks = TensorGroup()

    def build(self, index: int) -> nn.Module:
        resolved, source = self.resolved, self.weights
        settings, vlm = resolved.section.model, resolved.vlm
        module = vlm.build_layer(index, seed=settings.seed if source is None else None, dtype=resolved.dtype)
        if source is not None:
            vlm.begin_adapters(index, module, seed=settings.seed)
        share_layer(vlm, index, module, self.ranks)
        # The first replica of each stage reads weights. Those of the others stay NaN until DeepSpeedEngine.__init__
        # sends them the first one's parameters (_broadcast_model), as it always does: no file is read per replica.
        if source is not None and resolved.layout.position(dist.get_rank()).replica == 0:
            load_layer(vlm, index, module, source, vlm.slices(index, self.ranks.size, self.ranks.rank))
        assert module.state_dict().keys() == dict(module.named_parameters()).keys(), "DeepSpeed sends parameters only"
        record, names = vlm.records[index], vlm.weight_names(index)
        for name, parameter in module.named_parameters():
            if record.freezes(names[name], settings.frozen):
                parameter.requires_grad_(False)
        return module


def _layer_spec(reader: _LayerReader, index: int) -> LayerSpec:
    """What PipelineModule._build calls build() of, if the layer is in this process's stage."""
    vlm = reader.resolved.vlm
    key, layer_class = vlm.records[index].tied_key, vlm.layer_class(index)
    if key is None:
        spec = LayerSpec(layer_class)
    else:
        # No forward_fn: PipelineModule._build wraps the module in a partial for it, which has no state_dict, and the
        # layer would be missing from checkpoints. The module itself tells its two uses apart by what it receives.
        tied: Any = layer_class  # families say which weights are tied
        spec = TiedLayerSpec(key, layer_class, tied_weight_attr=list(tied.tied_weights))
    # In place of a call of the class, which would build the layer from its arguments.
    spec.build = lambda log=False: reader.build(index)
    return spec
