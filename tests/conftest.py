"""What all tests share."""

import pytest
from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")


def pytest_collection_modifyitems(config, items):
    """Let files that start processes run first: they take longest, and both workers then end together.

    Of tests on a GPU, whose time is short, those of the first turns are the most telling ones.
    """
    starting = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in starting)
    if "cluster" in config.option.markexpr:
        markers = {item: marker for item in items if (marker := item.get_closest_marker("cluster"))}
        items.sort(key=lambda item: markers[item].args[0] if item in markers else 0)
        for item, marker in markers.items():
            if marker.kwargs.get("together") and config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))  # the tests share a launch
