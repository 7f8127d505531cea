"""Every recipe is rehearsed, all of its loop, on the tiny pipeline of its family.

Those that are for a tiny pipeline anyway are slow tests: others run them whole.
"""

import json
import re
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.config import load_config
from flowrl.config.load import preset_names
from flowrl.planning.dry_run import FAMILIES, dry

NAMES = [
    name if re.search(r"-\d+gb$", name) else pytest.param(name, marks=pytest.mark.slow)
    for name in preset_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_on_the_tiny_pipeline_of_its_family(name, tmp_path):
    real = load_config(name)
    config = dry(real, tmp_path)
    assert config.pipeline.path == FAMILIES[real.pipeline.backbone]
    for kept in ("objective", "rollout.tree", "rollout.kernel", "rollout.noise_level"):
        assert part(config, kept) == part(real, kept)
    align(config)
    lines = (Path(config.run.output_dir) / "metrics.jsonl").read_text().splitlines()
    moved = [row["grad/norm"] for row in map(json.loads, lines) if "grad/norm" in row]
    assert len(moved) == config.run.iterations and all(norm > 0 for norm in moved)


def part(config, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    return config
