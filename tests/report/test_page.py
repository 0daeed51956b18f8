from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.report.page import Imbalance
from omnibal.report.style import drawing, html_table, page, paragraph, picture, section
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile


def test_text_is_escaped():
    assert "<p>a &lt; b</p>" in page("t", "l", [section("s", paragraph("a < b"))])
    assert html_table(["x"], [["<"], ["2"]], marked=1).count('<tr class="mark"><td>2</td></tr>') == 1


def test_code_stands_between_backticks():
    assert paragraph("`a < b` runs, `c` too") == "<p><code>a &lt; b</code> runs, <code>c</code> too</p>"


def test_pictures_are_as_large_as_they_were_drawn(tmp_path):
    with drawing(tmp_path / "five_inches.png", 5, 2):
        pass
    assert f'alt="five inches" width="{5 * 96}"' in picture(tmp_path / "five_inches.png", "five inches")


def test_imbalance_is_the_spread_over_stages_and_over_time():
    profile = fixed_profile([1, 2, 3])
    loads = Load([[[9, 9]]], [[[10, 10]]])
    found = Imbalance.of(profile, loads, on_cluster(Plan(PackLimits(9, 10), 2, Partition((0, 2, 3)), ("none",) * 3)))
    assert found.forward_seconds.tolist() == [[3, 3], [3, 3]]
    # two micro-batches in flight in stage 0, one in stage 1; 100 bytes a layer each
    assert [row - found.memory_bytes[0][0] for row in found.memory_bytes[:, 0]] == [0, 0]
    assert [cells[1] for cells in found.rows()] == ["3,000.0 ± 0.0 ms"] * 2


def test_what_is_wider_than_the_page_scrolls_by_itself(tmp_path):
    with drawing(tmp_path / "five_inches.png", 5, 2):
        pass
    for part in (html_table(["x"], [["1"]]), picture(tmp_path / "five_inches.png", "five inches")):
        assert part.count('<div class="scroll"><') == part.count("</div>") == 1
