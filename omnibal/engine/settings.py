"""Settings of a run that goes on: those that it has now hold, and what cannot change is refused.

An optimizer's state, a schedule's and DeepSpeed's own bring back the learning rate, weight decay, clipping and other
settings that they were saved with.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from deepspeed.runtime import lr_schedules

from omnibal.config.resuming import Change, changes, is_refused, rule_of
from omnibal.errors import ConfigError

_SIMPLE: Final = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True)
class Settings:
    """Settings at the beginning of a run, before a step or a checkpoint changes what they became."""

    keys: Mapping[str, Any]
    """Of the ds_config, as ``settings_of`` gives them."""
    groups: list[dict[str, Any]]
    """Of the optimizer's groups of parameters."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Of a learning-rate schedule whose state holds its settings; DeepSpeed's hold the step alone."""

    @classmethod
    def of(cls, keys: Mapping[str, Any], optimizer: Any, scheduler: Any) -> "Settings":
        """The settings of an engine that is just made."""
        schedule = {} if scheduler is None or _is_function_of_step(scheduler) else dict(scheduler.state_dict())
        schedule.pop("_last_lr", None)  # follows from the others
        return cls(keys, [_group_settings(group) for group in optimizer.param_groups], schedule)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return record

    def changed_from(self, saved: Mapping[str, Any], *, with_optimizer: bool, with_schedule: bool) -> list[Change]:
        """What differs from the settings of a checkpoint.

        Args:
            saved: Its ``record``.
            with_optimizer: Whether its optimizer goes on.
            with_schedule: Whether its schedule goes on.

        Raises:
            ConfigError: Something does that cannot change while these go on.
        """
        now = self.record()
        of_keys = changes(saved["keys"], now["keys"])
        refused = [change for change in of_keys if is_refused(change)] if with_optimizer else []
        of_groups: dict[str, Change] = {}
        if with_optimizer:
            for group, of_group in zip(saved["groups"], now["groups"], strict=True):
                for name, before, value in changes(group, of_group):
                    key = f"optimizer.params.{name}"
                    of_groups.setdefault(key, Change(key, before, value))
            refused += [change for key, change in of_groups.items() if rule_of(key) != "taken"]
        of_schedule = changes(saved["schedule"], now["schedule"]) if with_schedule else []
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
    return isinstance(scheduler, tuple(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES))


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    simple = {name: value for name, value in group.items() if isinstance(value, _SIMPLE)}
    for name in ("params", "names", "initial_lr"):
        simple.pop(name, None)
    # torch's schedules have changed the other one by now
    return simple | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
