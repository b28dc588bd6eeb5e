"""The recipe pages: worked examples that compute what they say, and number tables that say what recipe.yaml says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from webagent_core.objectives import OBJECTIVES
from webagent_core.recipe import SOURCES, read_yaml, settings, shipped_recipes

torch.set_num_threads(1)

PAGES = {name: path.parent / "README.md" for name, path in shipped_recipes().items()}
HEADINGS = ("Method", "Formula", "Worked example", "Numbers", "Deviations and decisions", "Paper and released code")


def part(page: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading}"
    return found[1]


def run_example(block: str) -> tuple[dict, int]:
    """Runs an example; every assignment with a number as its comment must have that value, to the digits shown."""
    names: dict = {}
    lines, checked = block.splitlines(), 0
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], []), "example", "exec"), names)
        comment = re.search(r"# (-?\d+(?:\.(\d+))?)$", lines[statement.end_lineno - 1])
        if isinstance(statement, ast.Assign) and comment:
            value = float(names[statement.targets[0].id])
            digits = len(comment[2] or "")
            assert abs(value - float(comment[1])) <= 0.5000001 * 10**-digits, lines[statement.end_lineno - 1]
            checked += 1
    return names, checked


@pytest.mark.parametrize("name", PAGES)
def test_the_worked_example_computes_what_it_says(name):
    text = part(PAGES[name].read_text(), "Worked example")
    block = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "no python block"
    names, checked = run_example(block[1])
    assert checked >= 4
    assert names["computed"] == pytest.approx(names["loss"], abs=1e-12)  # by code, and by hand
    assert ("released" in names) == (OBJECTIVES[name].released is not None)


def shown(value: object) -> str:
    if value is None:
        return "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def numbers_table(name: str) -> str:
    path = shipped_recipes()[name]
    lines = ["| setting | paper | released | ours |", "|---|---|---|---|"]
    for setting, _, cell in settings(path, [read_yaml(path)], None):
        cell = cell if isinstance(cell, dict) else {"ours": cell}
        lines.append(f"| `{setting}` | " + " | ".join(shown(cell[s]) if s in cell else "" for s in SOURCES) + " |")
    return "\n".join(re.sub(r" +\|", " |", line) for line in lines) + "\n"


@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_on_the_page_are_those_of_the_recipe(name):
    assert numbers_table(name) in part(PAGES[name].read_text(), "Numbers")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_has_its_sections(name):
    page = PAGES[name].read_text()
    places = [page.index(f"\n## {heading}\n") for heading in HEADINGS]
    assert places == sorted(places)


def test_the_table_of_methods_links_to_every_page():
    table = (Path(__file__).resolve().parents[1] / "recipes" / "README.md").read_text()
    assert set(re.findall(r"^\| \[[^\]]+\]\((\w+)/\) \|", table, re.MULTILINE)) == set(PAGES)
