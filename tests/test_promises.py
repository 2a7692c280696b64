"""The pages that name tests name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["tests/PROMISES.md", "async_engine/SECURITY.md"])
def test_every_test_that_a_page_names_exists(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text())
    assert len(named) > 10
    for file, name in named:
        defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
        assert name in defined, f"{page}: {file} has no {name}"
