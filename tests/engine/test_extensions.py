"""A start that waits for an extension to be compiled says which one, and what to do if nobody compiles it."""

import pytest

from omnibal.engine.extensions import explained_wait


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("compiled", "fused_adam", "some_op"):
        (tmp_path / name).mkdir()
    return tmp_path


def said_after(seconds, capsys):
    with explained_wait(seconds) as timer:
        if seconds == 0 and timer.ident is not None:
            timer.join()
    return capsys.readouterr().err


def test_a_wait_for_a_lock_is_explained(folder, capsys):
    (folder / "some_op" / "lock").touch()
    said = said_after(0, capsys)
    assert said.startswith("Waiting for DeepSpeed's extension some_op to be compiled")
    assert said.endswith(f"delete {folder / 'some_op' / 'lock'}\n")
    assert "torch_adam" not in said


def test_an_optimizer_that_need_not_be_compiled_is_named(folder, capsys):
    (folder / "fused_adam" / "lock").touch()
    assert '"torch_adam": true' in said_after(0, capsys)


def test_nothing_is_said_without_a_lock_or_in_good_time_or_by_other_processes(folder, capsys, monkeypatch):
    assert said_after(0, capsys) == ""
    (folder / "some_op" / "lock").touch()
    assert said_after(3600, capsys) == ""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said_after(0, capsys) == ""
