"""Every recipe is rehearsed, all of its loop, on the tiny pipeline of its family.

By default one recipe for each way to learn; the others are a slow test.
"""

import json
import re
from functools import reduce
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.config import load_config
from flowrl.config.load import preset_names
from flowrl.planning.dry_run import rehearse
from flowrl.planning.model_specs import pipeline_class

WAYS = "grpo grpo-fast branchgrpo nft gdro solrl".split()
BY_WAY = [[n for n in preset_names() if re.search(rf"-{way}-\d+gb$", n)] for way in WAYS]
QUICK = [names[turn % len(names)] for turn, names in enumerate(BY_WAY) if names]
SLOW = [name for name in preset_names() if name not in QUICK]


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["one of a kind", "all others"],
)
@pytest.mark.slow
def test_a_recipe_runs_on_the_tiny_pipeline_of_its_family(names, tmp_path):
    for name in names:
        real = load_config(name)
        config = rehearse(real, tmp_path / name).config
        kind = pipeline_class(real.pipeline.path)
        assert pipeline_class(config.pipeline.path) == kind
        for key in ("objective", "rollout.tree", "rollout.kernel", "rollout.noise_level"):
            kept, wanted = (reduce(getattr, key.split("."), made) for made in (config, real))
            assert kept == wanted, key
        align(config)
        lines = (Path(config.run.output_dir) / "metrics.jsonl").read_text().splitlines()
        moved = [row["grad/norm"] for row in map(json.loads, lines) if "grad/norm" in row]
        assert len(moved) == config.run.iterations and all(norm > 0 for norm in moved)
