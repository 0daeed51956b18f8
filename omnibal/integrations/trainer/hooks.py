"""Hooks on a transformers.Trainer's way: what it logs, evaluates and keeps in checkpoints, and when it ends."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from math import isfinite
from types import MappingProxyType
from typing import Any, Final

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import seed_worker

from omnibal.advise.wait import CostByPhase, Sharding
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.data.packing_spec import OF, in_words
from omnibal.errors import ConfigError, reporting
from omnibal.feeds.sampler import MOST_SHOWN
from omnibal.formats.collate import IGNORED
from omnibal.integrations.trainer.memory import GIB
from omnibal.integrations.trainer.settings import data_rank_of, sharding_of
from omnibal.integrations.trainer.steps import Waiting
from omnibal.packs.collator import PackCollator
from omnibal.packs.loading import PackSampler, PaddedSampler
from omnibal.packs.proof import check_packed
from omnibal.processes import EndRequest, leave_ends_to_parent
from omnibal.profile.records import Level
from omnibal.ranks import any_rank

TARGETS: Final = ("labels", "shift_labels")
"""Fields of a batch that name target tokens; ``shift_labels``, if given, are what the loss takes."""
NON_PADDING: Final = "non_padding"
"""The value of ``include_num_input_tokens_seen`` for tokens that are no padding."""

GOING_ON: Final = MappingProxyType(
    {
        "limits": "balance(trainer, {})",
        "gradient_accumulation_steps": "balance with the limits and samples_per_step of the run that saved it",
        "num_replicas": "a launch on as many data-parallel ranks ({})",
        "seed": "TrainingArguments(data_seed={})",
        "padded": "balance(trainer, padded={})",
    }
)
"""How a run goes on with the packs of a checkpoint, by what differs."""


def worker_options(args: TrainingArguments) -> dict[str, Any]:
    """What a trainer's arguments say about the processes of a DataLoader, as Trainer's own loader takes it."""
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "worker_init_fn": partial(_begin_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    }


def _begin_worker(worker: int, **seeds: int) -> None:
    leave_ends_to_parent(worker)
    seed_worker(worker, **seeds)


_DOING: Final = "measuring of how even steps are"


class RecipeCallback(TrainerCallback, ABC):  # type: ignore[misc]
    """Keeps in Trainer's checkpoints what batches depend on, goes on from no other checkpoint, and checks the model."""

    @abstractmethod
    def made_from(self) -> dict[str, Any]:
        """What must be the same to go on, as JSON keeps it."""

    @abstractmethod
    def check(self) -> None:
        """Called once, when the model is wrapped and loaded, before the first step."""

    @abstractmethod
    def logged(self) -> dict[str, float]:
        """Figures of the steps since the last call; all ranks together."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Refuse a checkpoint with other batches, on all ranks alike, and check the model."""
        # Not under a callback's own name: Trainer makes callbacks anew of what it finds under their names.
        name = f"omnibal.{type(self).__name__}"
        kept: Any = state.stateful_callbacks
        own = self.made_from()
        if state.global_step and not args.ignore_data_skip:
            if name not in kept:
                raise ConfigError(
                    "the checkpoint must have been saved under balance as it is called now, got one of other batches; "
                    "ignore_data_skip=True begins its epoch anew"
                )
            for key, value in own.items():
                if (before := kept[name].get(key)) != value:
                    saved, found = (in_words(key, each)[:MOST_SHOWN] for each in (before, value))
                    way = GOING_ON[key].format(saved) if key in GOING_ON else "an equal run"
                    raise ConfigError(
                        f"{key}{OF.get(key, '')} must be as in the checkpoint, {saved}, got {found}; {way} "
                        "goes on with the checkpoint's packs, ignore_data_skip=True begins its epoch anew"
                    )
        kept[name] = own
        self.check()


ENCODERS: Final = MappingProxyType({"vision": "vision_units", "sound": "sound_units"})
"""Dist Ratios that are logged where the data have something for the encoder: their names, and columns of loads."""


class PacksCallback(RecipeCallback):
    """Goes on with the same packs only, and tells how even steps were; ``check`` checks the model before the first."""

    def __init__(
        self,
        trainer: Trainer,
        sampler: PackSampler,
        costs: CostByPhase | None,
        layout: Sharding,
        check: Callable[[], None],
        recompute: Level | tuple[Level, ...] = "none",
    ) -> None:
        self._trainer, self.sampler, self._check = trainer, sampler, check
        self.recompute = recompute
        self.costs, self.layout, self._accumulation = costs, layout, trainer.args.gradient_accumulation_steps
        self._began, self._unlogged = 0.0, list[dict[str, float]]()  # the figures of each step, by name
        self._encodes = dict.fromkeys(ENCODERS, False)  # whether the data have had anything for an encoder
        _leave_out_fillers(trainer)

    def made_from(self) -> dict[str, Any]:
        """What the packs were made from, and for which ranks."""
        sampler = self.sampler
        ranks = {"num_replicas": sampler.num_replicas, "gradient_accumulation_steps": sampler.micro_batches}
        kept: dict[str, Any] = sampler.state_dict(0)["made_from"]
        return kept | ranks | {"padded": isinstance(sampler, PaddedSampler)}

    def check(self) -> None:
        """Refuse micro-batches that changed since ``balance``, as where a search of hyperparameters sets them."""
        found = self._trainer.args.gradient_accumulation_steps
        if found != self._accumulation:
            raise ConfigError(
                f"gradient_accumulation_steps must stay as balance found it, {self._accumulation}, got {found}; "
                "set it before balance is called"
            )
        self._check()

    def held(self, state: TrainerState) -> tuple[Load, Step]:
        """What the packs of the step that was just trained hold, padding included, and the step."""
        index = (state.global_step - 1) % self.sampler.num_steps
        return self.sampler.load(index), self.sampler.step(index)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        self._began = time.perf_counter()

    @reporting(_DOING)
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Note how long the step took, and how even it was."""
        seconds = time.perf_counter() - self._began
        load, step = self.held(state)
        if args.include_num_input_tokens_seen == NON_PADDING:
            state.num_input_tokens_seen += step.llm_tokens
        waiting = Waiting.of(Load.stack([load]), self.costs, self.layout)
        for encoder, column in ENCODERS.items():
            self._encodes[encoder] |= bool(getattr(load, column).any())
        parts = [*(encoder for encoder, has in self._encodes.items() if has), "tokens"]
        figures = {f"dist_ratio_{part}": getattr(waiting, part) for part in parts}
        if waiting.share is not None:  # the counted share of the seconds that were measured
            figures["waited_seconds"] = waiting.share * seconds
        self._unlogged.append(figures | {f"share_{source}": held for source, (_, held) in step.shares.items()})

    def logged(self) -> dict[str, float]:
        steps, self._unlogged, own = self._unlogged, [], 0.0
        names = dict.fromkeys(name for step in steps for name in step)
        figures = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
        if torch.cuda.is_available():
            device = self._trainer.args.device
            with reporting(_DOING):
                own = torch.cuda.max_memory_allocated(device) / GIB
                torch.cuda.reset_peak_memory_stats(device)
            peaks = self._trainer.accelerator.gather(torch.tensor([own], device=device))
            figures |= {"peak_gib_fullest_rank": float(peaks.max()), "peak_gib_mean_rank": float(peaks.mean())}
        return figures


def _leave_out_fillers(trainer: Trainer) -> None:
    """Count tokens that are no padding by step: Trainer would count fillers, and leave out ends where they pad."""
    track: Callable[[Any], None] = trainer._track_num_input_tokens

    def tracked(inputs: Any) -> None:
        if trainer.args.include_num_input_tokens_seen != NON_PADDING:
            track(inputs)

    vars(trainer)["_track_num_input_tokens"] = tracked


class EndsWhenAsked(TrainerCallback):
    """Lets all ranks save and end behind the step in which SIGTERM or Ctrl-C reached any of them."""

    # A callback hears nothing of an exception, which must give the signals their meaning back: ``train`` is wrapped.

    # Trainer's own enable_jit_checkpoint lets each rank decide by itself, and ranks may come to different steps.
    def __init__(self, trainer: Trainer) -> None:
        self._request = EndRequest()
        train = trainer.train

        @wraps(train)
        def asked(*args: Any, **options: Any) -> Any:
            with EndRequest() as self._request:
                return train(*args, **options)

        vars(trainer)["train"] = asked

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        # It waits for the device, as Trainer itself does for the loss of each micro-batch.
        if any_rank(self._request.signal is not None, args.device):
            control.should_save = control.should_training_stop = True


class ExactEvaluation:
    """Lets a Trainer's ``evaluate`` and ``predict`` report Σ loss / Σ target tokens, each held-out sample once."""

    # If a model accepts ``num_items_in_batch``, transformers 5.23 evaluates a batch to ranks · (sum of its losses) /
    # (target tokens of all ranks' batches), and then drops the ranks' repeated samples. The mean is right only if the
    # held-out set divides by ranks times batch; a model that ignores ``num_items_in_batch`` (Qwen2-Audio) gets ranks
    # times its loss.

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._predict, self._loop = trainer.prediction_step, trainer.evaluation_loop
        self._loss, self._targets = 0.0, 0  # of this rank's batches

    def install(self) -> None:
        vars(self._trainer).update(prediction_step=self.prediction_step, evaluation_loop=self.evaluation_loop)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """In the place of Trainer's: the mean over a batch's own targets, without samples that are there twice."""
        trainer = self._trainer
        if not trainer.model_accepts_loss_kwargs or "labels" not in inputs:  # neither counted nor scaled
            return self._predict(model, inputs, *args, **options)
        inputs = {**inputs, **self._without_repeats(inputs)}
        counted = inputs.get("shift_labels", inputs["labels"][..., 1:])
        targets = int((counted != IGNORED).sum())
        # Without either of these two, Trainer asks the model for its mean over the batch at hand.
        asked = {name: getattr(trainer, name) for name in ("model_accepts_loss_kwargs", "compute_loss_func")}
        trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
        try:
            found = self._predict(model, inputs, *args, **options)
        finally:
            for name, value in asked.items():
                setattr(trainer, name, value)
        loss = float(found[0])
        if targets and (isfinite(loss) or not trainer.args.logging_nan_inf_filter):  # as Trainer takes its mean
            self._loss, self._targets = self._loss + loss * targets, self._targets + targets
        return found

    def _without_repeats(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The targets of a batch, none of rows that Accelerate repeats so that the last batches are even."""
        state = self._trainer.accelerator.gradient_state
        if not (state.in_dataloader and state.end_of_dataloader and state.remainder > 0):
            return {}
        # gather_for_metrics keeps the first samples of all ranks' batches, rank after rank.
        rank, num_replicas = data_rank_of(self._trainer)
        if isinstance(state.active_dataloader, DataLoaderDispatcher):  # its last batches may be smaller on all ranks
            share = len(inputs["labels"])
        else:
            share = state.active_dataloader.total_batch_size // num_replicas
        kept = min(max(state.remainder - rank * share, 0), share)
        found = dict[str, Tensor]()
        for name in TARGETS:
            if name in inputs and (len(inputs[name]) == share or kept == 0):  # else rows are no samples
                found[name] = inputs[name].clone()
                found[name][kept:] = IGNORED
        return found

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """In the place of Trainer's; metrics but the loss are Trainer's own."""
        self._loss, self._targets = 0.0, 0
        output = self._loop(*args, **options)
        model = self._trainer.model
        if sharding_of(self._trainer) == "ddp" and self._trainer.model_wrapped is model:
            # Marked so by an evaluation, Accelerate would not wrap the model to train, and ranks would train apart.
            vars(model).pop("_is_accelerate_prepared", None)
        own = torch.tensor([[self._loss, self._targets]], dtype=torch.float64, device=self._trainer.args.device)
        loss, targets = self._trainer.accelerator.gather(own).sum(0).tolist()
        if targets:
            output.metrics[f"{options.get('metric_key_prefix', 'eval')}_loss"] = loss / targets
        return output


def check_model(trainer: Trainer, collator: PackCollator, items: Sequence[Any]) -> None:
    """Check packs in the model as it is trained: only its wrapper can gather the weights of ZeRO 3 and FSDP."""
    model = trainer.model_wrapped
    # DeepSpeed rounds to 16 bits without telling Accelerate.
    rounded = trainer.accelerator.mixed_precision != "no" or next(model.parameters()).dtype.itemsize < 4
    # Compiled for two more kinds of batches, the model would meet torch.compile's limit of kinds sooner.
    eager = torch.compiler.set_stance("force_eager") if trainer.args.torch_compile else nullcontext()
    with eager:
        check_packed(model, collator, items, device=trainer.args.device, rounded=rounded)


def add_recipe(trainer: Trainer, callback: RecipeCallback) -> None:
    """Add a callback whose figures stand in what Trainer logs of a step, for whoever reports them."""
    log = trainer.log

    def with_figures(logs: dict[str, float], start_time: float | None = None) -> None:
        log(logs | callback.logged() if "loss" in logs else logs, start_time)

    vars(trainer)["log"] = with_figures
    trainer.add_callback(callback)
    _load_by_names_on_disk(trainer)


def _load_by_names_on_disk(trainer: Trainer) -> None:
    """Load checkpoints whose weights have other names on disk than in the model; refuse those that lack weights."""
    # transformers 5.23 saves InternVL and others under their names on disk, looks for the model's names when it goes on
    # or takes the best model, and trains on with what the model had, with a warning.
    warn = trainer._issue_warnings_after_load
    load, load_best = trainer._load_from_checkpoint, trainer._load_best_model
    folder = ""

    def loaded(result: Any) -> None:
        if not (result.missing_keys and result.unexpected_keys):
            warn(result)
            return
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        # What is trained may have more bits than what is frozen.
        dtype = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
        options = {"config": model.config, "dtype": dtype, "output_loading_info": True, "trust_remote_code": False}
        found, told = type(model).from_pretrained(folder, **options)
        if told["missing_keys"]:
            raise ConfigError(
                f"{folder} must hold all weights of the model, got no {min(told['missing_keys'])} "
                f"({len(told['missing_keys'])} are missing)"
            )
        model.load_state_dict(found.state_dict())

    # _issue_warnings_after_load gets no folder: these two keep it.
    def load_from(path: str, model: Any = None) -> None:
        nonlocal folder
        folder = path
        load(path, model)

    def load_best_from() -> None:
        nonlocal folder
        folder = str(trainer.state.best_model_checkpoint)
        load_best()

    vars(trainer).update(
        _issue_warnings_after_load=loaded, _load_from_checkpoint=load_from, _load_best_model=load_best_from
    )
