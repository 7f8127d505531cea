"""`flowrl recipes` lists what the package has."""

import json

from flowrl.cli.recipes import METHODS
from flowrl.config.load import preset_names

NAMES = [name for name in preset_names() if not name.startswith(METHODS)]


def test_every_recipe_is_listed_with_what_decides_a_choice(flowrl):
    code, out, _ = flowrl("recipes", "--json")
    rows = {row["recipe"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and list(rows) == NAMES
    row = rows["sd3.5-medium-nft-24gb"]
    assert (row["method"], row["GPU"], row["ran"]) == ("DiffusionNFT", "24 GB", "no")
    assert rows["quickstart"]["GPU"] == "none" and rows["quickstart"]["ran"] == "yes"
    assert rows["quickstart"]["trained rewards"] == "geneval"
    _, some, _ = flowrl("recipes", "FLUX", "gdro", "--json")
    assert [json.loads(line)["recipe"] for line in some.splitlines()] == ["flux.1-dev-gdro-80gb"]
    assert flowrl("recipes", "nonesuch")[0] == 1
    methods = [name for name in preset_names() if name not in NAMES]
    out = flowrl("recipes", "methods")[1]
    assert methods and all(name in out for name in methods)
