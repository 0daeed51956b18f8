"""What a transformers.Trainer does on the way that packs need: check, record, measure, and go on from checkpoints."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
from transformers import Trainer, TrainerCallback, TrainerState

from omnibal.advise.wait import Sharding
from omnibal.cost import Load
from omnibal.errors import ConfigError
from omnibal.integrations.expected import Costs, Waiting
from omnibal.integrations.loading import PackSampler
from omnibal.integrations.packing import PackCollator, check_packed
from omnibal.integrations.padded import PaddedSampler
from omnibal.ranks.extensions import ExplainedWait

GIB: Final = 2**30


class Trained(NamedTuple):
    """A step that was trained."""

    seconds: float
    samples: int
    waiting: Waiting
    shares: Mapping[str, tuple[float, float]]
    """Of a mixture's sources: asked for, and held."""


class RecipeCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps in Trainer's checkpoints what batches depend on, goes on from no other one, and checks the model."""

    def made_from(self) -> dict[str, Any]:
        """What must be the same to go on, as JSON keeps it."""
        raise NotImplementedError

    def check(self) -> None:
        """Called once, when the model is wrapped and loaded, before the first step."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Refuse a checkpoint with other batches, on all ranks alike, and check the model.

        Raises:
            ConfigError: The checkpoint has other batches, or as of ``check``.
        """
        # Under a name that is no callback's: Trainer makes callbacks anew of what it finds under theirs.
        own, name = self.made_from(), f"omnibal.{type(self).__name__}"
        kept: Any = state.stateful_callbacks
        if state.global_step and not args.ignore_data_skip:
            if name not in kept:
                raise ConfigError(
                    "the checkpoint must have been saved under balance as it is called now, got one of other batches; "
                    "ignore_data_skip=True begins its epoch anew"
                )
            for key, value in own.items():
                if kept[name].get(key) != value:
                    raise ConfigError(
                        f"{key} must be that of the checkpoint, {kept[name].get(key)!r}, got {value!r}; "
                        "ignore_data_skip=True begins its epoch anew"
                    )
        kept[name] = own
        self.check()


class PacksCallback(RecipeCallback):
    """Goes on with the same packs only, and tells how even steps were.

    Args:
        trainer: Trains on packs.
        sampler: Theirs.
        costs: Of each phase of a micro-batch, if known.
        layout: How ranks share their work.
        check: As of ``RecipeCallback``.
    """

    def __init__(
        self, trainer: Trainer, sampler: PackSampler, costs: Costs | None, layout: Sharding, check: Callable[[], None]
    ) -> None:
        self._trainer, self._sampler, self._check = trainer, sampler, check
        self._costs, self._layout, self._accumulation = costs, layout, trainer.args.gradient_accumulation_steps
        self._began, self._steps, self._unlogged = 0.0, list[Trained](), list[Trained]()
        self._peaks: list[float] = []

    @property
    def vision_unit(self) -> str:
        """What vision units are, for people."""
        return self._sampler.lengths.vision_unit

    def made_from(self) -> dict[str, Any]:
        """The packs', and who trains them."""
        sampler = self._sampler
        ranks = {"num_replicas": sampler.num_replicas, "gradient_accumulation_steps": sampler.micro_batches}
        kept: dict[str, Any] = sampler.state_dict(0)["made_from"]
        return kept | ranks | {"padded": isinstance(sampler, PaddedSampler)}

    def check(self) -> None:
        """Refuse micro-batches that changed since ``balance``, then run the check that was given.

        Raises:
            ConfigError: Their number is another one, as where a search of hyperparameters sets it.
        """
        found = self._trainer.args.gradient_accumulation_steps
        if found != self._accumulation:
            raise ConfigError(
                f"gradient_accumulation_steps must stay as balance found it, {self._accumulation}, got {found}; "
                "set it before balance is called"
            )
        self._check()

    def held(self, state: TrainerState) -> tuple[Load, int, Mapping[str, tuple[float, float]]]:
        """What the packs of the step that was just trained hold: (ranks, micro-batches), samples, shares of sources."""
        step = (state.global_step - 1) % self._sampler.num_steps
        samples = len(self._sampler.packs_of_step(step).samples)
        return self._sampler.load(step), samples, self._sampler.shares_of(step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Begin to measure."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Note how long the step took, and how even it was."""
        load, samples, shares = self.held(state)
        waiting = Waiting.of(Load.stack([load]), self._costs, self._layout)
        self._unlogged.append(Trained(time.perf_counter() - self._began, samples, waiting, shares))

    def logged(self) -> dict[str, float]:
        """Figures of the steps since the last call; all ranks together."""
        steps, self._unlogged = self._unlogged, []
        self._steps += steps
        figures = _means(steps)
        if torch.cuda.is_available():
            device = self._trainer.args.device
            peak = torch.tensor([torch.cuda.max_memory_allocated(device) / GIB], device=device)
            torch.cuda.reset_peak_memory_stats(device)
            peaks = self._trainer.accelerator.gather(peak)
            figures |= {"peak_gib_fullest_rank": float(peaks.max()), "peak_gib_mean_rank": float(peaks.mean())}
            self._peaks.append(figures["peak_gib_fullest_rank"])
        return figures

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Say in one line what was measured."""
        steps = self._steps + self._unlogged
        if not (steps and state.is_world_process_zero):
            return
        figures, seconds = _means(steps), sum(step.seconds for step in steps)
        samples = sum(step.samples for step in steps)
        text = (
            f"omnibal: {samples} samples in {len(steps)} steps of {seconds / len(steps):.3g} s, without loading "
            f"{samples / seconds:.3g} samples a second"
        )
        waiting = Waiting(figures["dist_ratio_vision"], figures["dist_ratio_tokens"], None)
        text += "".join(f"; {told}" for told in waiting.told(self._sampler.num_replicas, self.vision_unit))
        if "waited_seconds" in figures and self._sampler.num_replicas > 1:
            text += f"; by counted costs a rank waited {figures['waited_seconds']:.2g} s a step"
        if self._peaks:
            text += f"; at most {max(self._peaks):.1f} GiB on a rank"
        print(text)


def _means(steps: list[Trained]) -> dict[str, float]:
    """Over the steps; seconds that ranks waited are the counted share of the seconds that were measured."""
    if not steps:
        return {}
    count = len(steps)
    figures = {
        "dist_ratio_vision": sum(step.waiting.vision for step in steps) / count,
        "dist_ratio_tokens": sum(step.waiting.tokens for step in steps) / count,
    }
    shares = [(step.waiting.share, step.seconds) for step in steps]
    if all(share is not None for share, _ in shares):
        figures["waited_seconds"] = sum((share or 0.0) * seconds for share, seconds in shares) / count
    held = {source: sum(step.shares[source][1] for step in steps) / count for source in steps[0].shares}
    return figures | {f"share_{source}": share for source, share in held.items()}


class ExplainsStart(TrainerCallback):
    """Explains what a start under DeepSpeed waits for, until training begins."""

    def __init__(self) -> None:
        self._wait = ExplainedWait()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """The optimizer is there: all extensions are loaded."""
        self._wait.close()


def check_model(trainer: Trainer, collator: PackCollator, items: Sequence[Any]) -> None:
    """Check packs in the model as it is trained: only its wrapper can gather the weights of ZeRO 3 and FSDP.

    Raises:
        ConfigError: As of ``check_packed``.
    """
    model = trainer.model_wrapped
    # DeepSpeed rounds to 16 bits without telling Accelerate.
    rounded = trainer.accelerator.mixed_precision != "no" or next(model.parameters()).dtype.itemsize < 4
    # Compiled for two more kinds of batches, the model would meet torch.compile's limit of kinds sooner.
    eager = torch.compiler.set_stance("force_eager") if trainer.args.torch_compile else nullcontext()
    with eager:
        check_packed(model, collator, items, device=trainer.args.device, rounded=rounded)


def log_figures(trainer: Trainer, logged: Callable[[], dict[str, float]]) -> None:
    """Let what Trainer logs of a step hold further figures, for whoever reports them."""
    log = trainer.log

    def with_figures(logs: dict[str, float], start_time: float | None = None) -> None:
        log(logs | logged() if "loss" in logs else logs, start_time)

    vars(trainer)["log"] = with_figures


def load_by_names_on_disk(trainer: Trainer) -> None:
    """Load checkpoints whose weights have other names on disk than in the model.

    transformers 5.23 saves InternVL and others under their names on disk, looks for the model's names when it goes on
    or takes the best model, and trains on with what the model had, with a warning. A checkpoint that lacks weights is
    then refused: a ConfigError ends the call of ``trainer.train`` on all ranks.
    """
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
