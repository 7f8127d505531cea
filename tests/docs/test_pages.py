"""What the pages name exists: files, options, commands, metrics, rewards, objectives, recipes."""

import re
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml

from flowrl.cli import app
from flowrl.cli.recipes import METHODS
from flowrl.config import Config, parse_config
from flowrl.config.load import preset_names
from flowrl.config.messages import walk
from flowrl.config.objectives import Objective
from flowrl.scoring.spec import BUILT_IN

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PATHS}
SMALLEST = {"prompts": {"train": "tiny:all:train"}, "rewards": [{"name": "ocr"}]}


def code(text: str) -> list[str]:
    """Return what stands in backquotes, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M))


def first_cells(page: str) -> set[str]:
    """Return what stands in backquotes in the first cell of each row of the page's tables."""
    rows = [line.split("|")[1] for line in PAGES[page].splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)}


@pytest.mark.parametrize("page", list(PAGES))
def test_links_lead_to_files_and_headings(page):
    here = (ROOT / page).parent
    targets = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', PAGES[page])
    for target in (markdown or html for markdown, html in targets):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = here / name if name else ROOT / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_the_index_lists_every_page_and_every_command():
    index = PAGES["docs/README.md"]
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", index))
    assert listed == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} - {"README.md"}
    assert set(re.findall(r"`flowrl ([\w-]+)", index)) == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("page", list(PAGES))
def test_options_and_metrics_that_a_page_names_exist(page):
    options = {option.path.replace(".0.", ".") for option in walk(Config)}
    sections = {path for path in options if "." not in path}
    metrics = re.findall(r"^\| `(.+?)` \|", PAGES["docs/metrics.md"], re.MULTILINE)
    groups = {name.partition("/")[0] for name in metrics}
    patterns = [re.sub(r"<\w+>", r"[^/]+", name) for name in metrics]
    for text in code(PAGES[page]):
        for name in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w/(])", text):
            option = re.sub(r"\.\d+\.", ".", name).replace("rewards[].", "rewards.")
            if name.partition(".")[0] in sections and not re.search(
                r"\.(md|py|json|yaml|txt)", name
            ):
                assert option in options, name
        if text.partition("/")[0] in groups and re.fullmatch(r"[a-z_]+/[\w/<>]+", text):
            assert any(re.fullmatch(pattern, text) for pattern in patterns), text


def test_tables_list_every_reward_objective_recipe_and_option_of_memory():
    assert set(BUILT_IN) <= first_cells("docs/rewards.md")
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    assert kinds <= first_cells("docs/objectives.md")
    recipes = {name for name in preset_names() if not name.startswith(METHODS)}
    assert recipes <= first_cells("docs/recipes.md")
    for option in walk(Config):
        if option.path.startswith("memory."):
            assert option.path in PAGES["docs/memory.md"], option.path


def test_recipes_printed_on_pages_are_valid():
    checked = 0
    for page, text in PAGES.items():
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            data = yaml.safe_load(block)
            if isinstance(data, dict) and set(data) <= set(Config.model_fields):
                assert parse_config(SMALLEST | data), page
                checked += 1
    assert checked > 5


def test_the_architecture_page_says_where_things_are():
    page = PAGES["docs/architecture.md"]
    rows = re.findall(r"^\| .+ \| `([\w/]+\.py)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert len(rows) > 10
    for file, name in rows:
        text = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), (file, name)
    for path in (ROOT / "flowrl").iterdir():
        if (path / "__init__.py").exists():
            assert f"  {path.name}/ " in page, path.name
