"""The commands on the page of exports work as they stand there, and its table is the code's."""

import re
import shlex
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.config import load_config
from flowrl.config.load import sort_arguments
from flowrl.export.hub import licence_of

PAGE = (Path(__file__).parents[1] / "docs" / "export.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line)[1:] for block in BLOCKS for line in block.splitlines() if "flowrl" in line
]
BASES = {
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
    "FLUX.1-schnell": "black-forest-labs/FLUX.1-schnell",
    "SD3.5 Medium and Large": "stabilityai/stable-diffusion-3.5-large",
    "SANA": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
}


def test_every_export_reaches_its_format_with_its_place(monkeypatch):
    seen = []
    for name in ("diffusers", "comfyui", "merged", "hub"):
        record = lambda source, *to, name=name, **how: seen.append((name, *to, how))  # noqa: E731
        monkeypatch.setattr(f"flowrl.export.formats.export_{name}", record)
    for words in COMMANDS:
        if words[0] == "export":
            with pytest.raises(SystemExit) as end:
                main(words)
            assert not end.value.code
    assert [call[0] for call in seen] == ["diffusers", "comfyui", "merged", "hub"]
    assert [call[1].name for call in seen[:3]] == ["lora", "quickstart.safetensors", "merged"]
    assert seen[3][-1] == {"repository": "me/quickstart", "private": False}


def test_the_training_pushes_where_the_page_says():
    (words,) = (words[1:] for words in COMMANDS if words[0] == "train")
    request = sort_arguments(words)
    run = load_config(request.recipe, request.overrides).run
    assert run.push_to_hub and run.hub_model_id == "me/quickstart"
    assert load_config("quickstart", ["run.hub_private=true"]).run.hub_private


def test_the_licences_are_those_of_the_card():
    rows = dict(re.findall(r"^\| (.+?) \| `(.+?)` \|$", PAGE, re.MULTILINE))
    assert set(rows) - set(BASES) == {"the built-in tiny pipelines"}
    for row, base in BASES.items():
        licence = licence_of(base)
        assert licence is not None and (licence.name or licence.id) == rows[row]


def test_every_format_has_a_row():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [
        "diffusers", "comfyui", "merged", "hub"
    ]  # fmt: skip
