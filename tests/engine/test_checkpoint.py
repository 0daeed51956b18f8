"""Checkpoints on disk: what goes into one, when one is whole, and which one a run goes on from."""

from omnibal.engine.checkpoint import write_side_files
from tests.engine.small import small_config

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja")
OTHERS = ("preprocessor_config.json", "generation_config.json", "additional_chat_templates/tools.jinja")


def test_only_known_files_of_the_model_go_into_a_checkpoint(tmp_path):
    model = tmp_path / "model"
    checkpoint = model / "checkpoints" / "global_step1"  # in the model's folder, as some have it
    foreign = ("model.safetensors", "model.gguf", ".git/config", "data.json", "checkpoints/global_step0/config.json")
    checkpoint.mkdir(parents=True)
    for name in (*TOKENIZER, *OTHERS, *foreign):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    write_side_files(checkpoint, {}, model, small_config())
    folder = checkpoint / "model"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {*TOKENIZER, *OTHERS, "config.json"}
    assert all((folder / name).read_text() == name for name in (*TOKENIZER, *OTHERS))
