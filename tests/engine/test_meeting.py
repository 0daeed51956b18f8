"""How the processes of a launch meet."""

import pytest

from omnibal.engine.initialize import meet
from omnibal.errors import ConfigError


def test_a_process_without_a_launcher_is_told_of_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="processes must be started by a launcher, got no LOCAL_RANK"):
        meet("gloo")
