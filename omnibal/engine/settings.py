"""Settings of a run that goes on: which may change, and how those that it has now come to hold.

An optimizer's state, a schedule's and DeepSpeed's own bring back the learning rate, weight decay, clipping and other
settings that they were saved with.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from deepspeed.runtime import lr_schedules

from omnibal.errors import ConfigError

T = TypeVar("T")
# Keys whose value must be the checkpoint's, with all keys inside them but those of _FREE. Every other key may have a
# new value: `CheckpointedEngine` compares what follows from several keys, the layout and the position in the data.
_FIXED: Final = (
    "zero_optimization",  # round_robin_gradients, say, decides which rank has the state of which parameter
    "omnibal.optimizer.weight_decay",
    "omnibal.model.lora",
)
_FREE: Final = (
    "omnibal.model.lora.dropout",
    *(f"zero_optimization.{name}" for name in (
        "stage",  # the optimizer's state is read by the names of weights
        # how gradients travel
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights",
        "ignore_unused_parameters", "log_trace_cache_warnings", "enable_sanity_checks",
    )),
)  # fmt: skip
# Settings of an optimizer's groups that its state does not depend on.
_OF_GROUPS: Final = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov")


class SettingChange(NamedTuple):
    """A setting whose value is not the checkpoint's."""

    key: str
    saved: Any
    value: Any

    def __str__(self) -> str:
        now, before = ("left out" if value is None else f"{value!r:.60}" for value in (self.value, self.saved))
        return f"{self.key} {now} (was {before})"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    keys = dict.fromkeys((*saved, *now))
    return [SettingChange(key, saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)]


def is_refused(change: SettingChange) -> bool:
    """Whether a run does not go on with it; to leave out what is off changes nothing.

    >>> is_refused(SettingChange("zero_optimization.round_robin_gradients", None, True))
    True
    """
    is_fixed = change.key not in _FREE and f"{change.key}.".startswith(tuple(f"{key}." for key in _FIXED))
    return is_fixed and (change.saved or None) != (change.value or None)


_SIMPLE: Final = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True)
class Settings:
    """Settings at the beginning of a run, before a step or a checkpoint changes what they became."""

    keys: dict[str, Any]  # values of the ds_config by key, from `omnibal.config.settings_of`
    groups: list[dict[str, Any]]  # settings of each parameter group of the optimizer
    # State of a learning-rate schedule that keeps its settings there; empty for DeepSpeed's, which keep the step
    schedule: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: dict[str, Any], optimizer: Any, scheduler: Any) -> "Settings":
        schedule = {} if scheduler is None or _is_function_of_step(scheduler) else dict(scheduler.state_dict())
        schedule.pop("_last_lr", None)  # follows from the others
        return cls(keys, [_group_settings(group) for group in optimizer.param_groups], schedule)

    def record(self) -> dict[str, Any]:
        """The settings as JSON holds them: what JSON has no form for, as a string."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return record

    def changed_from(self, saved: Mapping[str, Any], *, with_optimizer: bool) -> list[SettingChange]:
        """What differs from the settings of a checkpoint; ``with_optimizer``: also in its groups and its schedule."""
        now = self.record()
        of_keys = changes(saved["keys"], now["keys"])
        refused = [change for change in of_keys if is_refused(change)] if with_optimizer else []
        of_groups: dict[str, SettingChange] = {}
        if with_optimizer:
            for group, of_group in zip(now["groups"], saved["groups"], strict=True):
                for name, before, value in changes({**of_group, "name": None}, {**group, "name": None}):
                    key = f"optimizer.params.{name}"
                    of_groups.setdefault(key, SettingChange(key, before, value))
            refused += [change for key, change in of_groups.items() if key.rpartition(".")[2] not in _OF_GROUPS]
        of_schedule = changes(saved["schedule"], now["schedule"]) if with_optimizer else []
        refused += [
            change._replace(key=f"{change.key} of the learning-rate schedule")
            for change in of_schedule
            if "{" in json.dumps((change.saved, change.value))  # schedules within it, whose place is in there, too
        ]
        if refused:
            key, before, value = refused[0]
            raise ConfigError(
                f"{key} must be that of the checkpoint ({before}) to resume, got {value}; to go on under another one, "
                "export the checkpoint and start from the exported model"
            )
        # A ds_config says these itself, in the user's words.
        own = [] if "optimizer.type" in now["keys"] else list(of_groups.values())
        own_schedule = [] if "scheduler.type" in now["keys"] else of_schedule
        return of_keys + own + [change._replace(key=f"lr_scheduler.{change.key}") for change in own_schedule]

    def renew_optimizer(self, optimizer: Any, saved: Mapping[str, Any]) -> None:
        """Let the settings hold in an optimizer that has loaded its state."""
        for group, of_group, before in zip(optimizer.param_groups, self.groups, saved["groups"], strict=True):
            for name, value in of_group.items():
                old = before.get(name)
                if _as_json(value) == old:
                    continue
                if name == "lr":  # a schedule has multiplied it
                    group["lr"] = value if not old or group["lr"] == old else group["lr"] * value / old
                    if "initial_lr" in group:
                        group["initial_lr"] = value
                else:
                    group[name] = value

    def check_groups(self, saved: Mapping[str, Any], *, by_name: bool) -> None:
        """Refuse parameter groups that are not those of a checkpoint, in its order."""
        # `by_name`: ranks read the optimizer's state by the names of weights, not each its own file.
        own, before = ([group.get("name") for group in groups] for groups in (self.groups, saved["groups"]))
        are_told_apart = len({*own} - {None}) == len(own)
        if len(own) == len(before) == 1 or (own == before and (are_told_apart or not by_name)):
            return
        remedy = 'give each a "name" of its own' if own == before else "export it and start from the exported model"
        raise ConfigError(
            f"names of the optimizer's parameter groups must be those of the checkpoint, {before}, each once and in "
            f"this order, got {own}; {remedy}"
        )

    def renew_schedule(self, scheduler: Any, saved: Mapping[str, Any]) -> None:
        """Let the settings hold in a schedule that has loaded its state."""
        for name, value in self.schedule.items():
            if _as_json(value) != saved["schedule"].get(name):
                setattr(scheduler, name, value)


def renew_rate(scheduler: Any) -> None:
    """Give the optimizer the rate of the step that a schedule has loaded: else the next step takes the saved one."""
    if scheduler is not None and _is_function_of_step(scheduler) and scheduler.last_batch_iteration >= 0:
        scheduler.step(scheduler.last_batch_iteration)


def _is_function_of_step(scheduler: Any) -> bool:
    # The state of DeepSpeed's own schedules is last_batch_iteration; step(n) sets the rates of step n.
    return isinstance(scheduler, tuple(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES))


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    simple = {name: value for name, value in group.items() if isinstance(value, _SIMPLE)}
    for name in ("params", "names", "initial_lr"):
        simple.pop(name, None)
    # torch's schedules have changed the other one by now
    return simple | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
