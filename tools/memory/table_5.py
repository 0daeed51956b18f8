"""Which kernels and which constant make the OmniBal paper's Table 5 out of our footprint; see README.md."""

import sys
from dataclasses import replace
from pathlib import Path

from paper_tables import GIB, LIMITS, MEMORY, RECOMPUTED, TABLE_5, boundaries_of, paper_levels

sys.path.insert(0, str(Path(__file__).parents[1] / "partition"))
from markdown import table
from paper_models import BASELINE
from selective import profile_of

from omnibal.cluster import Layout
from omnibal.cost import CostModel, Load
from omnibal.memory.footprint import Footprint, StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.profile.records import LayerCost

CONSTANT = 10.5
"""GiB on every device beside the model: fitted, the same for all stages and both rows of the table."""
MICRO_BATCHES = 16


def fused(layer: LayerCost) -> LayerCost:
    """A block whose RMS norms keep their input in 16 bits and whose SwiGLU keeps its two inputs and nothing else."""
    sizes, degree = layer.sizes, BASELINE.tensor_parallel
    hidden, intermediate = sizes.get("hidden", 0), sizes.get("intermediate", 0)
    if layer.kind == "vision_block":  # 4 norms' inputs and outputs, values, attention, 2 branches; the MLP's activation
        kept = CostModel(vision_units=2 / degree * sizes["tokens_per_tile"] * (12 * hidden + 2 * intermediate))
    elif layer.kind == "decoder_block":  # 2 norms' inputs and outputs; queries, keys, values, attention; gate and up
        query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
        elements = 4 * hidden + 2 * query + 2 * key_value + 2 * intermediate
        kept = CostModel(llm_tokens=2 / degree * elements)
    else:
        return layer
    # the inputs of recomputed blocks are split too (sequence parallelism)
    return replace(layer, saved_bytes={"none": kept, "full": 1 / degree * layer.saved_bytes["full"]})


def stages(*, is_fused: bool, recomputed: tuple[int, ...]) -> tuple[StageMemory, ...]:
    """Our footprint of the paper's cut, without an overhead."""
    profile = profile_of(BASELINE)
    if is_fused:
        profile = replace(profile, layers=tuple(map(fused, profile.layers)))
    partition = Partition(boundaries_of(profile, BASELINE.blocks))
    load = Load(LIMITS.vision_units, LIMITS.llm_tokens, LIMITS.llm_tokens**2)
    schedule = one_f_one_b(len(BASELINE.blocks), MICRO_BATCHES)
    layout = Layout(len(BASELINE.blocks), BASELINE.num_replicas, accumulate_float32=False)
    footprint = Footprint(profile, load, schedule, layout, overhead_bytes=0)
    return footprint.stages(partition, paper_levels(profile, partition, recomputed))


def main() -> None:
    """Print the table as Markdown: GiB in use, published and by each picture."""
    rows = []
    for (name, free), recomputed in zip(TABLE_5.items(), (BASELINE.blocks, RECOMPUTED[BASELINE.language]), strict=True):
        rows.append((name, "the paper", *(f"{MEMORY / GIB - value:.1f}" for value in free)))
        for label, is_fused in (("our footprint (torch's modules, 2 GiB beside)", False), ("fused kernels", True)):
            used = [stage.total / GIB for stage in stages(is_fused=is_fused, recomputed=recomputed)]
            beside = CONSTANT if is_fused else 2
            words = f"{label}, {CONSTANT} GiB beside" if is_fused else label
            rows.append((name, words, *(f"{size + beside:.1f}" for size in used)))
    print(table(("", "GiB in use", *(f"stage {stage}" for stage in range(len(BASELINE.blocks)))), rows))


if __name__ == "__main__":
    main()
