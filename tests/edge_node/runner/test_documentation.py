"""The Python of docs/collecting.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.edge_node.runner.conftest import Served

_PAGE = Path(__file__).parents[3] / "docs" / "collecting.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(site: Served, number: int) -> None:
    before = {t.id for t in site.node.store.read(after_s=0, until_s=4e9)}
    code = SNIPPETS[number].replace("http://127.0.0.1:8010", site.url)
    exec(compile(code, f"snippet {number}", "exec"), {"__name__": "snippet"})
    made = {t.id for t in site.node.store.read(after_s=0, until_s=4e9)} - before
    assert len(made) == ("create(" in code)  # those that ask are recorded, by their mark or their reward
