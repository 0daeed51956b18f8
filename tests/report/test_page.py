from omnibal.cost import Load
from omnibal.memory.footprint import TrainingSetup
from omnibal.pipeline.boundaries import Partition
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.report.html import page, paragraph, section, table
from omnibal.report.imbalance import Imbalance
from tests.pipeline.profiles import fixed_profile


def test_text_is_escaped():
    assert "<p>a &lt; b</p>" in page("t", "l", [section("s", paragraph("a < b"))])
    assert table(["x"], [["<"], ["2"]], marked=1).count('<tr class="mark"><td>2</td></tr>') == 1


def test_imbalance_is_the_spread_over_stages_and_over_time():
    profile = fixed_profile([1, 2, 3])
    loads = Load([[[9, 9]]], [[[10, 10]]])
    found = Imbalance.of(profile, loads, Partition((0, 2, 3)), ("none",) * 3, TrainingSetup(), one_f_one_b(2, 2))
    assert found.forward_seconds.tolist() == [[3, 3], [3, 3]]
    # two micro-batches in flight in stage 0, one in stage 1; 100 bytes a layer each
    assert [row - found.memory_bytes[0][0] for row in found.memory_bytes[:, 0]] == [0, 0]
    assert [cells[1] for cells in found.rows()] == ["3,000.0 ± 0.0 ms"] * 2
