from pathlib import Path

from typer.testing import CliRunner

from common.inference.model_folder import ModelFolder, open_model
from deploy.cli import app
from tests.common.inference.test_gguf_import import write_gguf


def test_a_gguf_file_becomes_a_model_folder(tmp_path: Path, model: ModelFolder) -> None:
    write_gguf(tmp_path / "m.gguf", model)
    arguments = ["model", "import", str(tmp_path / "m.gguf"), str(tmp_path / "made")]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0
    made = open_model(tmp_path / "made")
    assert f"4 layers, 280 tokens, context 512, digest {made.digest[:12]}" in said.output
    again = CliRunner().invoke(app, arguments)
    assert "exists; give a new folder" in str(again.exception)
