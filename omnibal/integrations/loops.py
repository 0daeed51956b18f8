"""What a training loop of one's own needs to train on balanced packs: a loader, and a loss exact over each step.

The loop may run under DDP, FSDP, DeepSpeed, Accelerate or Lightning, or be a trainer's whose loader can be replaced. No
host and no transformers is imported here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from omnibal.advise.wait import phase_costs
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture
from omnibal.data.packs import Loads, loads_of
from omnibal.data.source_draws import typical_lengths
from omnibal.data.step_size import StepSize, fit_step
from omnibal.errors import ConfigError, end_in_one_line, reporting
from omnibal.formats.collate import IGNORED
from omnibal.integrations.lengths import LENGTHS, prepare, samples_to_check
from omnibal.integrations.trainer.settings import (
    asked_steps,
    data_seed,
    recompute_of,
    refuse_values,
    set_micro_batches,
    sharding_of,
)
from omnibal.integrations.trainer.steps import counted_profile, describe
from omnibal.packs.apart import refuse_long_rows
from omnibal.packs.collator import FAMILIES, Collator, PackCollator, SampleCollator
from omnibal.packs.loading import PackedView, PackItems, PackSampler
from omnibal.packs.losses import loss_per_target
from omnibal.packs.proof import check_packed
from omnibal.passes import device_name
from omnibal.ranks import rank_and_size

if TYPE_CHECKING:  # hosts on torch 2.1 have it elsewhere
    from torch.distributed.device_mesh import DeviceMesh

TOKEN_WEIGHT: Final = "token_weight"
"""Name in a batch of the factor of its target tokens' summed losses: replicas / target tokens of the step."""


class PackLoader(DataLoader[Any]):
    """A loader of this rank's packs, which is told the epoch and goes on in the middle of one.

    Its state says how many whole steps the loop has taken from it, so save it behind an optimizer step. Packs that
    workers have prefetched do not count.
    """

    _is_accelerate_prepared = True  # or accelerator.prepare would deal each rank's packs to all ranks again
    _taken = 0  # batches that the loop has taken since the epoch began, or since it was resumed

    @property
    def pack_sampler(self) -> PackSampler:
        sampler: Any = self.batch_sampler
        return sampler  # type: ignore[no-any-return]

    @property
    def epoch(self) -> int:
        """The current epoch: the one to begin with after ``load_state_dict``."""
        return self.pack_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; where it is the current one, stay where ``load_state_dict`` went."""
        if epoch != self.epoch:
            self._taken = 0
        self.pack_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a loop asks for no more than an iterator
        for self._taken, batch in enumerate(super().__iter__(), start=1):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loop's position as a few JSON values, the same on all ranks."""
        sampler = self.pack_sampler
        return sampler.state_dict(sampler.steps_done + self._taken // sampler.micro_batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also one of another number of ranks; a state of another plan is refused."""
        self.pack_sampler.load_state_dict(state)
        self._taken = 0


class WeighingTokens:
    """A collator whose batches hold what ``pack_loss`` needs."""

    # A pack brings its weight from the sampler, so that a loader which a host makes anew, as Accelerate does to skip
    # batches, has it, too.

    def __init__(self, collate: Callable[[PackItems], Any]) -> None:
        self._collate = collate

    def __call__(self, drawn: PackItems) -> Any:
        return self._collate(drawn) | {TOKEN_WEIGHT: torch.tensor(drawn.weight)}


class ItemCollator(SampleCollator):
    """A host's own collator of several items, for hosts that flatten or pad the items of a batch themselves."""

    def __init__(
        self,
        collate: Collator,
        measure: Callable[[Any], Loads],
        lengths: SampleLengths | None = None,
        *,
        absorb: bool = False,
    ) -> None:
        super().__init__(collate, lengths, absorb=absorb)
        self._measure = measure

    def sample(self, item: Any) -> Any:
        return item

    def loads(self, sample: Any) -> Loads:
        return self._measure(sample)

    def pack(self, samples: Sequence[Any]) -> Any:
        return self._collate([*samples])


def item_loads(item: Mapping[str, Any]) -> Loads:
    """Loads of an item: ``input_ids``, ``labels``, and rows (tiles, patches) of its images' and its videos' pixels.

    >>> item_loads({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    (0, 3, 2)
    """
    pixels = (item.get(name) for name in ("pixel_values", "pixel_values_videos"))
    images, videos = (0 if rows is None else len(rows) for rows in pixels)
    targets = torch.as_tensor(item["labels"]).flatten()[1:] != IGNORED
    return loads_of(images, videos, torch.as_tensor(item["input_ids"]).numel(), int(targets.sum()))


def balanced_loader(
    dataset: Any,
    collate: Collator,
    limits: PackLimits | Callable[[SampleLengths], StepSize],
    *,
    model: torch.nn.Module | None = None,
    measure: Callable[[Any], Loads] = item_loads,
    padded: bool = False,
    mesh: "DeviceMesh | None" = None,
    lengths: SampleLengths | Path | None = None,
    micro_batches: int = 1,
    seed: int = 0,
    absorb_other_lengths: bool = False,
    weigh_tokens: bool = True,
    mixture: Mixture | Mapping[str, Any] | None = None,
    **options: Any,
) -> PackLoader:
    """A loader of this rank's packs: every sample once an epoch, and ranks that end together.

    Call it on all ranks, behind ``init_process_group`` and before the model is wrapped or sharded. Hand the loader to
    nothing that deals batches to ranks again; ``accelerator.prepare`` leaves it as it is. Where a pack has no image, an
    image of another sample is run along without its targets: all ranks run the ViT, and none waits for another.

    Args:
        dataset: Read by index; the same on all ranks.
        collate: Of a list of items. With ``model`` it is called with single items, which are laid one after another.
        limits: The most a pack may hold; ``replace_loader`` finds it when it knows the lengths, and ``micro_batches``.
        model: The model that will train on packs; packs of a few samples must prove exact in it. None where ``collate``
            flattens the items of a batch or pads them itself, as the host's model wants them.
        measure: Vision units, LLM tokens and target tokens of an item, and its videos' vision units where the data have
            videos, for ``collate`` without ``model``.
        padded: Whether ``collate`` pads the items of a batch to the longest: limits then count the padding.
        mesh: Of the data-parallel ranks, one dimension of a larger one: the others get the same packs. By default every
            process is a data-parallel rank.
        lengths: Of every sample, target tokens among them; by default each is read once, by the workers of one of the
            ranks. A folder keeps what was found for the next start.
        micro_batches: Packs of each rank and step.
        seed: Decides which samples share packs; equal seeds give equal epochs.
        absorb_other_lengths: Whether samples that are not as long as planned are warned of once and trained; their
            step's loss is then divided by the target tokens that were planned. They end the run otherwise.
        weigh_tokens: Whether batches hold what ``pack_loss`` needs; not where a trainer counts target tokens itself.
        mixture: What share each source gets, as of ``omnibal.integrations.transformers.balance``.
        options: Of ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory`` and the like.

    Raises:
        ConfigError: An argument or the model does not allow packs, or ranks hold different data.
        DataError: The dataset or its collator does not, or the lengths are not the dataset's.
    """
    end_in_one_line()
    if padded and model is not None:
        raise ConfigError("model must be None where batches are padded, got one; it is there to check packs")
    rank, num_ranks = _ranks_of(mesh)

    def size_of(lengths: SampleLengths) -> StepSize:
        size = StepSize(limits, micro_batches) if isinstance(limits, PackLimits) else limits(lengths)
        size.limits.refuse_none(lengths)
        if model is not None:
            refuse_long_rows(model, size.limits)
        if weigh_tokens and lengths.target_tokens is None:
            raise ConfigError("lengths must have target_tokens for an exact loss, got none")
        return size

    sampler, collator = prepare(
        dataset,
        partial(ItemCollator, collate, measure) if model is None else partial(PackCollator.of, model, collate),
        lengths,
        size_of,
        padded=padded,
        check_lengths=not absorb_other_lengths,
        mixture=None if mixture is None else Mixture.of(mixture),
        saves=rank_and_size()[0] == 0,
        num_workers=options.get("num_workers", 0),
        num_replicas=num_ranks,
        rank=rank,
        seed=seed,
        image_in_every_pack=True,  # a filler costs little, and no host need know of parameters without gradients
    )
    if model is not None:
        config: Any = model.config
        samples = samples_to_check(sampler.lengths, is_known=config.model_type in FAMILIES)
        check_packed(model, collator, [dataset[sample] for sample in samples])
    view: Any = PackedView(dataset)
    collate_packs: Any = WeighingTokens(collator) if weigh_tokens else collator
    return PackLoader(view, batch_sampler=sampler, collate_fn=collate_packs, **options)


def _ranks_of(mesh: "DeviceMesh | None") -> tuple[int, int]:
    """This process's data-parallel rank, and how many there are."""
    return rank_and_size() if mesh is None else (mesh.get_local_rank(), mesh.size())


def replace_loader(
    trainer: Any, limits: PackLimits, *, samples_per_step: int | None = None, exact_loss: bool = False, **options: Any
) -> PackLoader:
    """Let a trainer that is built on transformers.Trainer train on packs; its loader changes, and its steps stay.

    For training code that pins its own transformers or computes its own loss; ``omnibal.integrations.transformers``
    does more for a Trainer of transformers 5. An optimizer step holds about as many samples as the trainer's arguments
    ask for: packs are made smaller, and ``gradient_accumulation_steps`` becomes another, as ``balance`` does it. A line
    says what was asked, what came, and what becomes of the loss. The trainer uses the returned loader as it is.

    Args:
        trainer: Before training. Its dataset, collator and arguments are read; measured lengths are kept in its
            ``output_dir``.
        limits: The most a pack may hold.
        samples_per_step: Samples of an optimizer step, of all ranks together; by default those that the trainer's
            arguments ask for.
        exact_loss: Whether the loss of a step is the mean over its target tokens, of all ranks and packs, in place of
            what the trainer makes of each pack; for models that return ``logits``.
        options: Further keywords of ``balanced_loader``.

    Raises:
        ConfigError: The trainer's settings do not allow packs.
    """
    end_in_one_line()
    args, mixture, num_ranks = trainer.args, options.get("mixture"), _ranks_of(options.get("mesh"))[1]
    refuse_values(args, of_loader=True)
    asked = asked_steps(trainer, num_ranks, samples_per_step, limits)

    def size_of(lengths: SampleLengths) -> StepSize:
        limits.refuse_none(lengths)
        return fit_step(
            typical_lengths(lengths, None if mixture is None else Mixture.of(mixture)),
            asked.samples_per_step,
            batch_size=asked.batch_size,
            num_replicas=num_ranks,
            most=limits,
            padded=options.get("padded", False),
        )

    own = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
    own |= {"lengths": Path(args.output_dir) / LENGTHS, "seed": data_seed(trainer), "weigh_tokens": exact_loss}
    loader = balanced_loader(trainer.train_dataset, trainer.data_collator, size_of, **own | options)
    sampler = loader.pack_sampler
    if rank_and_size()[0] == 0:
        with reporting("the line about packs"):
            counted = counted_profile(trainer.accelerator.unwrap_model(trainer.model), device_name(args.device))
            costs = None if counted is None else phase_costs(counted, recompute=recompute_of(trainer))
            device = None if counted is None else counted.device
            print(describe(sampler, costs, sharding_of(trainer), asked, device=device))
        print(_told_loss(trainer, num_ranks * sampler.micro_batches, exact_loss=exact_loss))
    set_micro_batches(trainer, sampler.micro_batches)
    if exact_loss:
        _take_pack_loss(trainer)
    trainer.get_train_dataloader = lambda *_, **__: loader
    return loader


def _told_loss(trainer: Any, packs: int, *, exact_loss: bool) -> str:
    if exact_loss:
        return "omnibal: the loss of a step is the mean over its target tokens, of all ranks and packs"
    return (
        f"omnibal: {type(trainer).__name__}.compute_loss stays; where it takes the mean over a batch, as outputs.loss "
        f"is, a step now has the mean of {packs} packs' means, and not that of its target tokens: "
        "replace_loader(..., exact_loss=True) takes this one"
    )


def _take_pack_loss(trainer: Any) -> None:
    """Let a trainer train with ``pack_loss``, and evaluate as before."""
    own, micro_batches = trainer.compute_loss, 1
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = True
    else:  # older trainers divide by the micro-batches of a step whatever they do not know to be divided
        trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
        micro_batches = trainer.args.gradient_accumulation_steps

    def compute_loss(model: Any, inputs: Any, *others: Any, **further: Any) -> Any:
        if TOKEN_WEIGHT not in inputs:
            return own(model, inputs, *others, **further)
        return pack_loss(model, inputs) * micro_batches

    trainer.compute_loss = compute_loss


def pack_loss(
    model: Callable[..., Any], batch: Mapping[str, Any], *, device: torch.device | str | None = None
) -> Tensor:
    """A pack's share of its step's loss, the mean over all of the step's target tokens, on all ranks and in all packs.

    Call ``backward`` on it for every pack of a step: hosts take the mean of gradients over ranks, for which it makes
    up. A host that divides by the packs of a step too (Accelerate, DeepSpeed, Lightning) wants it multiplied by them.

    Args:
        model: Returns ``logits``, wrapped or not.
        batch: What a ``balanced_loader`` with ``weigh_tokens`` yields.
        device: Where to send the batch; by default to the model's first parameter, where the batch is in the host's
            memory.
    """
    if device is None and batch["input_ids"].device.type == "cpu":
        device = next((parameter.device for parameter in getattr(model, "parameters", tuple)()), None)
    inputs = {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    labels, weight = inputs.pop("labels"), inputs.pop(TOKEN_WEIGHT)
    return loss_per_target(model(**inputs), labels, num_items_in_batch=1) * weight
