"""Packs as the planner's compiled parts have them, made from lists and read back."""

import numpy as np

from omnibal.data.balancing.tables import COUNT, DIMENSIONS, EXCESS, FIRST, LOADS, NEXT, NOWHERE, ROOM, SIZES


def sample_table(loads, sizes=None):
    """A row per sample; sizes are (vision units, tokens), 0 by default: then every pack has room."""
    loads = np.asarray(loads, dtype=np.int32).reshape(-1, DIMENSIONS)
    table = np.zeros((len(loads), LOADS + DIMENSIONS), dtype=np.int32)
    table[:, NEXT] = NOWHERE
    table[:, LOADS:] = loads
    if sizes is not None:
        table[:, SIZES : SIZES + 2] = np.asarray(sizes).reshape(-1, 2)
    return table


def empty_packs(number, limits=(1 << 20, 1 << 20)):
    packs = np.zeros((number, EXCESS + DIMENSIONS), dtype=np.int64)
    packs[:, FIRST] = NOWHERE
    packs[:, ROOM], packs[:, ROOM + 1] = limits
    return packs


def pack_table(samples, members, targets=None, limits=(1 << 20, 1 << 20)):
    """Link lists of samples; excesses are against ``targets``, by default 0."""
    packs = empty_packs(len(members), limits)
    for pack, chosen in enumerate(members):
        for sample in reversed(chosen):
            samples[sample, NEXT] = packs[pack, FIRST]
            packs[pack, FIRST] = sample
        packs[pack, COUNT] = len(chosen)
        packs[pack, ROOM : ROOM + 2] -= samples[chosen, SIZES : SIZES + 2].sum(axis=0, dtype=np.int64)
        packs[pack, EXCESS:] = samples[chosen, LOADS:].sum(axis=0, dtype=np.int64)
        if targets is not None:
            packs[pack, EXCESS:] -= np.asarray(targets)[pack]
    return packs


def members_of(samples, packs):
    """The samples of each pack, as lists."""
    members = []
    for pack in range(len(packs)):
        members.append([])
        sample = packs[pack, FIRST]
        while sample != NOWHERE:
            members[-1].append(int(sample))
            sample = samples[sample, NEXT]
    return members


def check_tables(samples, packs, limits=(1 << 20, 1 << 20), targets=None):
    """Every sample is in one pack, and the packs' records agree with their samples."""
    members = members_of(samples, packs)
    assert sorted(sample for pack in members for sample in pack) == list(range(len(samples)))
    for pack, chosen in enumerate(members):
        target = 0 if targets is None else np.asarray(targets)[pack]
        assert packs[pack, COUNT] == len(chosen)
        held = samples[chosen, SIZES : SIZES + 2].sum(axis=0, dtype=np.int64)
        assert packs[pack, ROOM : ROOM + 2].tolist() == (np.array(limits) - held).tolist()
        excess = samples[chosen, LOADS:].sum(axis=0, dtype=np.int64) - target
        assert packs[pack, EXCESS:].tolist() == excess.tolist()
