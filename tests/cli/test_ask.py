import pytest

from omnibal.demo import write_demo
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's data, and its model with random weights."""
    paths = write_demo(tmp_path_factory.mktemp("demo"), samples=40, held_out=20)
    model = load_model(paths.model)
    save_model(model, lambda index: dict(model.build_layer(index, seed=0).state_dict()), paths.model)
    return paths


def test_a_model_answers_about_images_and_without(omnibal, demo):
    image = next((demo.meta.parent / "images").rglob("*.png"))
    omnibal("ask", demo.model, "What is this?", "--image", image)
    omnibal("ask", demo.model, "What is this?")
    output = omnibal("ask", demo.model, "--meta", demo.held_out_meta, "--count", 2).stdout
    assert "right answer" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["What?", "--meta", "held_out.json"], "ask must get a question or --meta"),
        ([], "ask must get a question or --meta"),
        (["What?", "--image", "missing.png"], "image must exist, got missing.png"),
        (["Is <image> like <image>?"], "question must hold one <image> per image, got 2 for 0 images"),
        (["--meta", "missing.json"], "dataset must be a readable text file, got missing.json"),
    ],
)
def test_what_cannot_be_asked_is_named(omnibal, demo, arguments, message):
    assert message in omnibal("ask", demo.model, *arguments, exit_code=2).stderr


def test_a_folder_without_a_model_is_named(omnibal, tmp_path):
    assert str(tmp_path) in omnibal("ask", tmp_path, "What?", exit_code=2).stderr
