"""Optimizers and schedules by themselves, of runs that go on under other settings."""

import json

import pytest
import torch
from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupDecayLR
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR

from omnibal.engine.settings import Settings, renew_rate
from omnibal.errors import ConfigError

STEPS = 7


def made(make_scheduler, **settings):
    """An optimizer of two groups, its schedule, and their settings."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 0.1, "weight_decay": 0.01} | settings)
    scheduler = make_scheduler(optimizer)
    return optimizer, scheduler, Settings.of({}, optimizer, scheduler)


def trained(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(3)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def gone_on(make_scheduler, make_other, **settings):
    """Rates of the next steps, settings, and changes, of a run that goes on under other settings."""
    optimizer, scheduler, before = made(make_scheduler)
    trained(optimizer, scheduler, STEPS)
    saved = json.loads(json.dumps(before.record()))
    other, other_scheduler, now = made(make_other, **settings)
    changed = now.changed_from(saved, with_optimizer=True)
    other.load_state_dict(optimizer.state_dict())
    now.renew_optimizer(other, saved)
    if other_scheduler is not None:
        other_scheduler.load_state_dict(scheduler.state_dict())
        now.renew_schedule(other_scheduler, saved)
    renew_rate(other_scheduler)
    return other, trained(other, other_scheduler, 3), {change.key: change.value for change in changed}


SCHEDULES = {
    "none": lambda optimizer: None,
    "warmup_decay": lambda optimizer: WarmupDecayLR(optimizer, 20, warmup_max_lr=None, warmup_num_steps=3),
    "warmup_cosine": lambda optimizer: WarmupCosineLR(optimizer, 20, warmup_num_steps=3),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "step": lambda optimizer: StepLR(optimizer, 3, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_changes_nothing_goes_on_as_it_was(name):
    optimizer, scheduler, _ = made(SCHEDULES[name])
    whole = trained(optimizer, scheduler, STEPS + 3)
    _, rates, changed = gone_on(SCHEDULES[name], SCHEDULES[name])
    assert changed == {}
    assert rates == whole[STEPS:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_another_rate_holds_from_the_first_step_on(name):
    optimizer, scheduler, _ = made(SCHEDULES[name], lr=0.02)
    expected = trained(optimizer, scheduler, STEPS + 3)[STEPS:]
    _, rates, changed = gone_on(SCHEDULES[name], SCHEDULES[name], lr=0.02)
    assert torch.tensor(rates).allclose(torch.tensor(expected), rtol=1e-6)
    assert changed or name.startswith("warmup")  # of DeepSpeed's the ds_config tells


def test_settings_of_groups_hold():
    other, _, changed = gone_on(SCHEDULES["cosine"], SCHEDULES["cosine"], weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5)
    assert changed == {
        "optimizer.params.weight_decay": 0.3,
        "optimizer.params.betas": [0.8, 0.9],
        "optimizer.params.eps": 1e-5,
    }
    assert [group["weight_decay"] for group in other.param_groups] == [0.3, 0.0]
    assert {group["betas"] for group in other.param_groups} == {(0.8, 0.9)}


def test_settings_of_a_schedule_hold():
    _, rates, changed = gone_on(SCHEDULES["step"], lambda optimizer: StepLR(optimizer, 4, gamma=0.1))
    assert changed == {"lr_scheduler.step_size": 4, "lr_scheduler.gamma": 0.1}
    assert [round(rate, 9) for rate, _ in rates] == [0.025, 0.0025, 0.0025]


def test_momentum_that_a_schedule_has_moved_is_no_other_setting():
    def one_cycle(optimizer):
        return OneCycleLR(optimizer, 0.1, 20)

    def of_deepspeed(optimizer):
        return OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=5)

    for make in (one_cycle, of_deepspeed):
        optimizer, scheduler, _ = made(make)
        whole = trained(optimizer, scheduler, STEPS + 3)
        other, rates, changed = gone_on(make, make)
        assert (changed, rates) == ({}, whole[STEPS:])
        assert [group["betas"] for group in other.param_groups] == [group["betas"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"amsgrad": True}, r"optimizer.params.amsgrad must be that of the checkpoint \(False\) to resume, got True"),
        ({"maximize": True}, r"optimizer.params.maximize must be that of the checkpoint"),
    ],
)
def test_settings_that_the_state_is_not_for_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        gone_on(SCHEDULES["cosine"], SCHEDULES["cosine"], **settings)


def test_a_schedule_of_schedules_cannot_change():
    def two(gamma):
        return lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 3), StepLR(optimizer, 3, gamma)], [5])

    with pytest.raises(ConfigError, match="_schedulers of the learning-rate schedule must be that of the checkpoint"):
        gone_on(two(0.5), two(0.7))
    assert gone_on(two(0.5), two(0.5))[2] == {}


def of_groups(*groups, lr=0.1, make_scheduler=SCHEDULES["cosine"]):
    """An optimizer of one weight for each group, and its settings."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in groups]
    named = [{"params": [weight], **group} for weight, group in zip(weights, groups, strict=True)]
    optimizer = torch.optim.AdamW(named, lr=lr)
    return optimizer, Settings.of({}, optimizer, make_scheduler(optimizer))


A, B = {"name": "a"}, {"name": "b"}


@pytest.mark.parametrize(
    ("before", "groups", "by_name", "remedy"),
    [
        ((A, B), (B, A), False, "export it"),
        ((A, B), (A, {"name": "c"}), False, "export it"),
        (({}, {}), (A, B), False, "export it"),  # of an omnibal that gave no names
        (({}, {}), ({}, {}), True, 'give each a "name" of its own'),
        ((A, A), (A, A), True, 'give each a "name" of its own'),
    ],
)
def test_groups_that_cannot_be_told_apart_are_refused(before, groups, by_name, remedy):
    now, saved = of_groups(*groups)[1], of_groups(*before)[1].record()
    with pytest.raises(ConfigError, match=f"names of the optimizer's parameter groups must be .*; {remedy}"):
        now.check_groups(saved, by_name=by_name)


def test_one_group_needs_no_name_and_groups_that_stay_none_of_their_own():
    for before, groups, by_name in (((A,), ({},), True), (({}, {}), ({}, {}), False), ((A, B), (A, B), True)):
        now, saved = of_groups(*groups)[1], of_groups(*before)[1].record()
        now.check_groups(saved, by_name=by_name)
        assert now.changed_from(saved, with_optimizer=True) == []
