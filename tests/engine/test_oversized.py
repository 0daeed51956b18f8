import pytest

from tests.engine.cases import changed, settings
from tests.engine.launch import launch
from tests.engine.small import save_small_model

pytestmark = pytest.mark.distributed


def test_a_pack_beyond_the_plan_recomputes_everything(tmp_path):
    save_small_model(tmp_path)
    config = changed(settings(tmp_path, num_stages=2), "packing", llm_tokens=16, vision_units=4)
    config = changed(config, "pipeline", recompute="none")
    for used in launch(2, "tests.engine.cases:levels_used", config):
        assert {tokens > 16 for tokens in used} == {False, True}
        assert all(levels == ({"full"} if tokens > 16 else {"none"}) for tokens, levels in used.items())
