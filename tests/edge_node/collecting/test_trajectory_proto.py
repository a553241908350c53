"""The generated code is the one of the .proto file in the repository."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

import edge_node.collecting as package

FOLDER = Path(package.__file__).parent


def test_the_generated_module_is_up_to_date(tmp_path: Path) -> None:
    arguments = ["protoc", f"-I{FOLDER}", f"--python_out={tmp_path}", str(FOLDER / "trajectory.proto")]
    assert protoc.main(arguments) == 0
    assert (tmp_path / "trajectory_pb2.py").read_text() == (FOLDER / "trajectory_pb2.py").read_text()
