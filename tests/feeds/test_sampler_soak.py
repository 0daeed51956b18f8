"""Millions of samples under a memory ceiling."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tools.synthetic import tiled_lengths

NUM_SAMPLES = 5_000_000
MOST_GROWTH_MIB = 250

SOAK = """
import json, resource, sys
import numpy as np
from omnibal import BalancedBatchSampler, PackLimits, SampleLengths

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def sampler(rank, num_replicas, lengths):
    return BalancedBatchSampler(lengths, PackLimits(16, 5120), num_replicas=num_replicas, rank=rank, micro_batches=4)

# Compile first: the compiler's own memory is not the sampler's.
list(sampler(0, 2, SampleLengths([1, 3, 5] * 500, [300, 900, 1400] * 500)))
before = peak_mib()
lengths = SampleLengths.load(sys.argv[1])
first = sampler(0, 16, lengths)
seen = np.zeros(len(lengths), dtype=np.uint8)
half = first.num_steps // 2
for index in range(half):
    seen[first.step(index).packs.samples] += 1
after = sampler(0, 12, lengths)
after.load_state_dict(json.loads(json.dumps(first.state_dict(half))))
for step in after.steps():
    seen[step.packs.samples] += 1
print(json.dumps({"missing": int((seen == 0).sum()), "repeated": int((seen > 1).sum()), "mib": peak_mib() - before}))
"""


@pytest.mark.slow
def test_an_epoch_of_millions_changes_ranks_halfway_in_little_memory(tmp_path):
    tile = tiled_lengths(500_000)
    tile.take(np.tile(np.arange(len(tile)), NUM_SAMPLES // len(tile))).save(tmp_path)
    done = subprocess.run([sys.executable, "-c", SOAK, str(tmp_path)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert (result["missing"], result["repeated"]) == (0, 0)
    assert result["mib"] < MOST_GROWTH_MIB  # the lengths' pages, one byte a sample, and a window
