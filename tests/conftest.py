"""What all tests share."""

import pytest
from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Let one worker of pytest-xdist run all files with tests that start processes: these are kept, and share cores."""
    starting = {item.path for item in items if item.get_closest_marker("distributed")}
    for item in items:
        if item.path in starting:
            item.add_marker(pytest.mark.xdist_group("processes"))
