import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.balancing.relief import relieve
from omnibal.data.balancing.scattering import scatter
from omnibal.data.balancing.tables import make_scratch
from tests.data.balancing.tables import check_tables, members_of, pack_table, sample_table

LIMITS = (9, 40)
WEIGHTS = (1000 // 9, 1000 // 40)


def tables(sizes, members):
    samples = sample_table([(0, 0, 0)] * len(sizes), sizes)
    return samples, pack_table(samples, members, limits=LIMITS)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=2, max_size=24),
    st.integers(2, 6),
    st.integers(0, 2**32),
)
def test_packs_over_the_limits_keep_a_sample_and_nothing_is_lost(sizes, num_packs, seed):
    members = [list(range(pack, len(sizes), num_packs)) for pack in range(num_packs)]
    samples, packs = tables(sizes, members)
    over = [pack for pack in range(num_packs) if (packs[pack, 2:4] < 0).any()]
    largest = [max(members[pack], key=lambda sample: max(np.multiply(sizes[sample], WEIGHTS))) for pack in over]
    scatter(samples, packs, WEIGHTS, np.uint64(seed))
    check_tables(samples, packs, LIMITS)
    found = members_of(samples, packs)
    assert sorted(sample for pack in found for sample in pack) == list(range(len(sizes)))
    if len(over) == 1:
        assert max(np.multiply(sizes[found[over[0]][0]], WEIGHTS)) == max(np.multiply(sizes[largest[0]], WEIGHTS))
        assert len(found[over[0]]) == 1


def test_what_no_exchange_of_two_packs_helps_is_relieved_after_it():
    """These samples fit into four packs of 40 tokens, but from where relief stops only if three packs change."""
    tokens = [11, 17, 5, 5, 17, 3, 23, 23, 7, 23, 19]
    samples, packs = tables([(0, size) for size in tokens], [list(range(pack, len(tokens), 4)) for pack in range(4)])
    assert relieve(samples, packs, WEIGHTS, 10_000, np.uint64(1), make_scratch()) == 1
    scatter(samples, packs, WEIGHTS, np.uint64(0))
    assert relieve(samples, packs, WEIGHTS, 10_000, np.uint64(0), make_scratch()) == 0
    found = members_of(samples, packs)
    assert sorted(sample for pack in found for sample in pack) == list(range(len(tokens)))
    assert all(sum(tokens[sample] for sample in pack) <= 40 for pack in found)
