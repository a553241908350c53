"""What is installed is what the lock names."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NAME = re.compile(r"[-_.]+")
_NOT_LOCKED = {"headwater", "pip", "setuptools", "wheel"}
_TORCH_COMPANIONS = ("nvidia-", "cuda-", "triton")
"""Come with PyPI's own build of torch on machines with another index; versions are torch's."""


def normal(name: str) -> str:
    return _NAME.sub("-", name).lower()


def test_the_installed_packages_are_the_locks() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {normal(n): v for n, v in (line.split("==") for line in lines if line and line[0] != "#")}
    installed = {normal(d.metadata["Name"]): d.version.split("+")[0] for d in distributions()}
    ours = {
        name: version
        for name, version in installed.items()
        if name not in _NOT_LOCKED and not name.startswith(_TORCH_COMPANIONS)
    }
    assert ours == locked


def test_every_dependency_of_the_project_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    lock = (ROOT / "constraints.txt").read_text().lower()
    for requirement in wanted:
        name = normal(re.split(r"[\[<>=!~ ]", requirement)[0])
        assert re.search(rf"^{name.replace('-', '[-_.]')}==", lock, re.MULTILINE), name
