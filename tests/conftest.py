"""What all tests share."""

import gc

import pytest
from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")
gc.disable()  # while tests are imported, and torch with them


def pytest_collection_modifyitems(config, items):
    """Let files that start processes run first: they take longest, and both workers then end together.

    Of tests on a GPU, whose time is short, those of the first turns are the most telling ones.
    """
    starting = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in starting)
    if "cluster" in config.option.markexpr:
        markers = {item: marker for item in items if (marker := item.get_closest_marker("cluster"))}
        items.sort(key=lambda item: _turn(item, markers.get(item)))
        for item, marker in markers.items():
            if marker.kwargs.get("together") and config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))  # the tests share a launch


def _turn(item, marker):
    """The turn of a test, and its processes: those of a launch wait for the next one of as many."""
    cell = item.callspec.params.get("cell") if hasattr(item, "callspec") else None
    return marker.args[0] if marker else 0, getattr(cell, "num_processes", 2)


def pytest_collection_finish(session):
    """Collections of garbage, of which each training asks several, need not look at what imports have left."""
    gc.collect()
    gc.freeze()
    gc.enable()
