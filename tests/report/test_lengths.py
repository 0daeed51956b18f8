import numpy as np
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.report.lengths import SourceStatistics, Statistics, lengths_table, source_statistics
from tests.report.printed import text_of

LENGTHS = SampleLengths(
    [1, 0, 5, 3],
    [300, 40, 1400, 900],
    target_tokens=[10, 20, 30, 40],
    source=[0, 2, 0, 0],
    source_names=["charts", "nothing", "text"],
)


def test_statistics_of_each_source_in_the_order_of_their_numbers():
    charts, nothing, text = source_statistics(LENGTHS)
    assert (charts.name, charts.samples, charts.with_image) == ("charts", 3, 3)
    assert charts.vision_units == Statistics(total=9, mean=3.0, p50=3.0, p99=pytest.approx(4.96), max=5)
    assert charts.target_tokens.total == 80
    assert (nothing.name, nothing.samples, nothing.llm_tokens) == ("nothing", 0, Statistics(0, 0.0, 0.0, 0.0, 0))
    assert (text.with_image, text.llm_tokens.max) == (0, 40)


def test_lengths_without_sources_or_targets():
    (entry,) = source_statistics(SampleLengths([1, 2], [10, 30]))
    assert (entry.name, entry.samples, entry.llm_tokens.mean, entry.target_tokens) == ("all", 2, 20.0, None)
    assert entry.to_record()["target_tokens"] is None


def test_totals_do_not_overflow():
    statistics = Statistics.of(np.full(3000, 2**30, dtype=np.int32))
    assert statistics.total == 3000 * 2**30


def test_the_table_has_a_section_per_source_and_one_for_all():
    lines = [line.split() for line in text_of(lengths_table(LENGTHS)).splitlines()]
    assert ["charts", "vision", "units", "3.0", "3", "5", "5"] in lines
    assert ["3", "samples", "LLM", "tokens", "866.7", "900", "1,390", "1,400"] in lines
    assert ["0.0%", "with", "image", "target", "tokens", "20.0", "20", "20", "20"] in lines
    assert ["all", "vision", "units", "2.2", "2", "5", "5"] in lines
    assert ["75.0%", "with", "image", "target", "tokens", "25.0", "25", "40", "40"] in lines


def test_a_single_source_needs_no_total():
    text = text_of(lengths_table(SampleLengths([1], [10], source=[0], source_names=["one"])))
    assert "all" not in text
    assert "target" not in text


def test_all_of_several_sources():
    assert SourceStatistics.of("all", LENGTHS).samples == 4
