"""Figures of pages are those of the data beside them."""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from flowrl.backbones.loading import pipeline_path
from flowrl.planning.duration import CARDS, SHARES
from scripts.bench.cost import break_even_gain, two_stage_ratio
from scripts.compare.page import load_page
from scripts.compare.report import Results, scores_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def quickstarts():
    return Results.read(load_page("quickstarts"), ROOT / "gallery" / "quickstarts")


def test_the_table_of_the_readme_is_that_of_the_gallery(quickstarts):
    computed = {row["method"]: row for row in scores_table(quickstarts)}
    rows = re.findall(r"^\| `flowrl train ([\w-]+)` \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for name, cells in rows:
        assert cells.split(" | ") == [
            computed[name][column]
            for column in (
                "tiny_judge, own steps", "change over seeds, own steps",
                "tiny_judge, 28 steps", "change over seeds, 28 steps",
            )
        ]  # fmt: skip


def test_the_share_of_better_and_worse_images_is_that_of_the_gallery(quickstarts):
    measure = "28_steps/tiny_judge"
    before = [image.scores[measure] for image in quickstarts.base_images["quickstart"]]
    after = [image.scores[measure] for image in quickstarts.images["quickstart"][0]]
    pairs = list(zip(before, after, strict=True))
    shares = [sum(a > b for b, a in pairs), sum(a < b for b, a in pairs)]
    pattern = r"Over (\d+) pairs of one seed, (\d+) % go .* and (\d+) %"
    said = re.search(pattern, README)
    assert said is not None
    percent = [round(100 * share / len(pairs)) for share in shares]
    assert [int(number) for number in said.groups()] == [len(pairs), *percent]


@pytest.mark.parametrize("name", ["tiny-sd3", "tiny-flux", "tiny-sana"])
def test_ceilings_and_bases_of_the_tiny_world_are_those_that_were_scored(name):
    world = " ".join((ROOT / "docs" / "tiny-world.md").read_text("utf-8").split())
    scores = json.loads((Path(pipeline_path(name)) / "scores.json").read_text())
    for kind in ("ceiling", "base"):
        each = [scores[kind][at]["judge"]["GenEval, mean"] for at in ("preset", "28 steps")]
        assert " and ".join(f"{score:.2f}" for score in each) in world, kind


def marked() -> list[tuple[str, str, str]]:
    """Return (page, folder of the gallery, paragraph) of each paragraph that names a folder."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "gallery/README.md"]
    return [
        (str(page.relative_to(ROOT)), folder, " ".join(paragraph.split()))
        for page in pages
        for paragraph in page.read_text("utf-8").split("\n\n")
        for folder in re.findall(r"<!-- figures: (gallery/[\w-]+) -->", paragraph)
    ]


@pytest.mark.parametrize(("page", "folder", "paragraph"), marked())
def test_intervals_of_a_marked_paragraph_are_on_the_page_that_it_names(page, folder, paragraph):
    said = re.findall(r"[+-]?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", paragraph)
    computed = (ROOT / folder / "README.md").read_text("utf-8")
    assert said and [one for one in said if one not in computed] == [], page


def test_costs_of_two_stages_are_those_of_the_cost_model():
    page = (ROOT / "docs" / "sol-rl.md").read_text("utf-8")
    (table,) = re.findall(r"^\| N \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    for line in table.splitlines():
        n, k, steps, gain, fixed, by_all, by_kept, pays = (
            cell.strip(" `") for cell in line[1:-1].split("|")
        )
        preview, whole = map(int, steps.split(" of "))
        counts = {"candidates": int(n), "keep": int(k), "preview_steps": preview, "steps": whole}
        ratio = two_stage_ratio(**counts, gain=float(gain), fixed=float(fixed))
        assert (by_all, by_kept) == (f"{ratio:.2f}", f"{ratio * int(n) / int(k):.2f}")
        assert pays == f"{break_even_gain(**counts, fixed=float(fixed)):.2f}"


def test_rates_that_were_measured_are_within_the_shares_that_a_plan_assumes():
    """The median of a card's operations per second over its iterations, compiled and plain."""
    measured = defaultdict(list)
    for path in (ROOT / "gallery" / "gpu").glob("*.json"):
        record = json.loads(path.read_text("utf-8"))
        for row in record["parts"].values():
            if record["machine"]["cards"] and "operations_per_second" in row:
                key = record["machine"]["card"], row["compile"]
                measured[key].append(row["operations_per_second"])
    assert {card for card, _ in measured} == {"NVIDIA H100 80GB HBM3"}
    for (_, compiled), rates in measured.items():
        most, least = SHARES[compiled]
        assert least <= statistics.median(rates) / CARDS["H100 SXM"].peak <= most
