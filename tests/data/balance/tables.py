"""Windows as the planner's compiled parts have them, made from lists and read back."""

from itertools import chain

import numpy as np

from omnibal.data.balance.rules import REPAIR_ROUNDS, Rules
from omnibal.data.balance.tables import (
    COST,
    COST_OVER_MEAN,
    COUNT,
    FIRST,
    MIX,
    NEXT,
    NOWHERE,
    PRECISION,
    SHARE,
    TOKENS,
    VISION,
    VISION_OVER_MEAN,
    VISION_ROOM,
    Tables,
)  # fmt: skip

LOADS = [VISION, COST, TOKENS]


def make_rules(step_packs, *, limits=(1 << 20, 1 << 20), group_steps=1, tolerance=0, repair_first=False):
    return Rules(
        step_packs=step_packs, num_replicas=step_packs, group_steps=group_steps, most_tokens=limits[1],
        encoders=np.array([[1, limits[0], tolerance]]), token_weight=1, costs=(0.0, 1.0, 0.0, 0.0),
        by_tokens=False, most_share=1 << 30, share_unit=1, whole_vision=False,
        repair_first=repair_first, repair_rounds=REPAIR_ROUNDS,
        share_of=np.zeros(1, dtype=np.int32),
    )  # fmt: skip


def make_window(loads, members, rules, *, targets=None, mixes=None):
    """Loads are (vision, cost, tokens) of samples; excesses are against ``targets``; mixes: bits of samples."""
    samples = np.zeros((len(loads), VISION + 1), dtype=np.int32)
    samples[:, NEXT] = NOWHERE
    samples[:, LOADS] = np.asarray(loads).reshape(-1, 3)
    samples[:, MIX] = 1 if mixes is None else mixes
    packs = np.zeros((len(members), VISION_ROOM + 1), dtype=np.int64)
    packs[:, FIRST] = NOWHERE
    for pack, chosen in enumerate(members):
        for sample in reversed(chosen):
            samples[sample, NEXT] = packs[pack, FIRST]
            packs[pack, FIRST] = sample
    thresholds = max(int(samples[:, MIX].max(initial=1)).bit_length() - 1, 0)
    bits = samples[:, MIX][:, None] >> np.arange(thresholds + 1) & 1
    steps = [
        list(chain(*members[begin : begin + rules.step_packs])) for begin in range(0, len(members), rules.step_packs)
    ]
    counts, share = np.array([bits[step].sum(axis=0, dtype=float) for step in steps]), bits[:, :-1].mean(axis=0)
    precision = 1 / np.maximum(share * (1 - share), 1e-9)
    usual = np.zeros((3, thresholds + 1))
    usual[SHARE, :-1], usual[PRECISION, :-1] = share, precision
    window = Tables.of(samples, packs, np.column_stack([counts, deviation_of(counts, usual)]), usual)
    packs[:, COUNT:] = rows_of(window, rules, targets)
    return window


def deviation_of(counts, usual):
    """Of every step: squared deviations of its counts from the usual ones, each over a sample's variance."""
    return ((counts[:, :-1] - counts[:, -1:] * usual[SHARE, :-1]) ** 2 * usual[PRECISION, :-1]).sum(axis=1)


def rows_of(window, rules, targets=None):
    """What the packs' rows should hold, from the samples that are in them."""
    rows = []
    for pack, chosen in enumerate(members_of(window)):
        vision, cost, tokens = window.samples[chosen][:, LOADS].sum(axis=0, dtype=np.int64)
        aim = (0, 0) if targets is None else targets[pack]
        rows.append(
            (len(chosen), cost - aim[1], rules.most_tokens - tokens, vision - aim[0], rules.encoders[0, 1] - vision)
        )
    return np.array(rows, dtype=np.int64)


def members_of(window):
    """The samples of each pack, as lists."""
    members = []
    for pack in range(len(window.packs)):
        members.append([])
        sample = window.packs[pack, FIRST]
        while sample != NOWHERE:
            members[-1].append(int(sample))
            sample = window.samples[sample, NEXT]
    return members


def check_window(window, rules, targets=None):
    """Every sample is in one pack, and all records agree with the samples."""
    members = members_of(window)
    assert sorted(sample for pack in members for sample in pack) == list(range(len(window.samples)))
    assert window.packs[:, COUNT:].tolist() == rows_of(window, rules, targets).tolist()
    counts, deviation = window.mixes[:, :-1], window.mixes[:, -1]
    np.testing.assert_allclose(deviation, deviation_of(counts, window.usual), rtol=1e-9, atol=1e-9)
    columns = counts.shape[1]
    for step, row in enumerate(counts):
        mine = list(chain(*members[step * rules.step_packs : (step + 1) * rules.step_packs]))
        bits = window.samples[mine][:, MIX].astype(np.int64)
        assert row.tolist() == [int((bits >> column & 1).sum()) for column in range(columns)]


__all__ = [
    "COST_OVER_MEAN",
    "VISION_OVER_MEAN",
    "VISION_ROOM",
    "check_window",
    "make_rules",
    "make_window",
    "members_of",
]
