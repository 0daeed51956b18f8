def test_what_is_no_checkpoint_is_named(omnibal, tmp_path):
    result = omnibal("export", tmp_path, tmp_path / "model", exit_code=2)
    assert f"checkpoint must be a folder that omnibal wrote completely, got {tmp_path}" in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_folder_whose_newest_checkpoint_is_gone_is_named(omnibal, tmp_path):
    (tmp_path / "latest").write_text("global_step7")
    result = omnibal("export", tmp_path, tmp_path / "model", exit_code=2)
    assert str(tmp_path / "global_step7") in result.stderr
