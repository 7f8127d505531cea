"""The troubleshooting page names only metrics and keys that exist."""

import re
from pathlib import Path

from flowrl.config import Config
from flowrl.config.messages import walk
from flowrl.errors import MEMORY, PHASES, REMEDIES, SECTIONS
from flowrl.training.metrics import METRICS, meaning

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_the_page_names_only_what_exists():
    # Every metric on the page is documented.
    named = {c for c in CODE if re.fullmatch(r"[a-z]+/[\w/<>]+", c)}
    assert len(named) >= 15
    assert {name for name in named if meaning(name) is None and name not in METRICS} == set()
    # Every metric that can show trouble is on the page.
    missing = set(METRICS) - set(CODE)
    assert missing == {"reward/<name>"}
    # Every key on the page is an option.
    keys = {option.path for option in walk(Config)}
    named = {
        found
        for code in CODE
        for found in re.findall(r"\b[a-z_]+\.[a-z_]+\b", code.partition(":")[0])
        if found.partition(".")[0] in {key.partition(".")[0] for key in keys}
    }
    assert len(named) >= 25
    assert named <= keys
    # Links within the page lead to a heading.
    headings = {
        re.sub(r"[^\w -]", "", line[3:]).strip().lower().replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("## ")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
    # Questions that users ask have an answer.
    for question in (
        "My reward does not rise",
        "It collapsed",
        "Out of memory",
        "The LoRA does nothing",
        "The ratio is not 1",
        "My run folder is in use",
    ):
        assert f"\n## {question}\n" in PAGE


def test_what_messages_say_that_helps_is_on_the_page():
    text = " ".join(PAGE.split())
    rows = dict(re.findall(r"^\| ([a-z, ]+) \| (.+) \|$", PAGE, re.MULTILINE))
    by_phase = {name: remedy for names, remedy in rows.items() for name in names.split(", ")}
    for phase in PHASES:
        assert by_phase[phase].startswith(MEMORY[phase]), phase
    for cause, remedy in REMEDIES.items():
        assert remedy in text, cause
        assert f"\n## {SECTIONS[cause]}\n" in PAGE
    assert "\n## The autoencoder is broken\n" in PAGE  # named in sampling/rollout.py
