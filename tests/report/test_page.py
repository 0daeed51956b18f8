from omnibal.report.style import drawing, html_table, page, paragraph, picture, section


def test_text_is_escaped():
    assert "<p>a &lt; b</p>" in page("t", "l", [section("s", paragraph("a < b"))])
    assert html_table(["x"], [["<"], ["2"]], marked=1).count('<tr class="mark"><td>2</td></tr>') == 1


def test_code_stands_between_backticks():
    assert paragraph("`a < b` runs, `c` too") == "<p><code>a &lt; b</code> runs, <code>c</code> too</p>"


def test_what_is_wider_than_the_page_shrinks_or_scrolls(tmp_path):
    with drawing(tmp_path / "five_inches.png", 5, 2):
        pass
    assert '<figure><img alt="five inches" src="data:image/png;base64,' in picture(
        tmp_path / "five_inches.png", "five inches"
    )
    assert html_table(["re-\ncompute"], [["1"]]).startswith(
        '<div class="scroll"><table>\n<thead><tr><th>recompute</th>'
    )
