import json

import pytest
from typer.testing import CliRunner

from omnibal.cli.main import app
from omnibal.data.synthetic import INTERNVL_MIX, tiled_lengths


@pytest.fixture
def omnibal():
    """Runs the command as a user does; the exit code is 0 unless the test says otherwise."""

    def run(*arguments, exit_code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == exit_code, result.output
        return result

    return run


@pytest.fixture(scope="session")
def token_lengths(tmp_path_factory):
    """JSON lists of lengths, as InternVL's packed training uses them: one per source."""
    folder = tmp_path_factory.mktemp("lengths")
    lengths = tiled_lengths(3000, seed=5)
    paths = []
    for number, source in enumerate(INTERNVL_MIX[:3]):
        part = lengths.take((lengths.source == number).nonzero()[0])
        loads = zip(part.vision_units.tolist(), part.llm_tokens.tolist(), strict=True)
        paths.append(folder / f"{source.name}.json")
        paths[-1].write_text(json.dumps([{"vit_num": tiles, "token_num": tokens} for tiles, tokens in loads]))
    return paths
