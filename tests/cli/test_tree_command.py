"""`flowrl tree`: what it prints, and that its refusals are one sentence."""

import re
import shlex
from pathlib import Path
from typing import Any

from flowrl.config import load_config, parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.trees.presets import PRESETS


def test_every_preset_shows_itself_and_says_what_works(flowrl):
    for name in sorted(PRESETS.keys() - {"custom"}):
        # Every preset says which leaves work when it does not.
        code, out, err = flowrl("tree", name, "--leaves", "11")
        assert ("11 images" in out) if code == 0 else ("group_size is 11" in err)
        # Every preset shows itself and what it says of recipes works.
        code, out, _ = flowrl("tree", name)
        assert code == 0
        words = shlex.split(re.search(r"In a recipe: (.*)", out)[1])  # type: ignore[index]
        if credit := PRESETS[name].credit:
            assert f'Its published credit: "objective.advantage={credit}"' in out
            words.append(f"objective.advantage={credit}")
            assert f"| `{name}` |" in PAGE and f"| `{credit}` |" in PAGE
        if name == "ode":  # nothing to learn from but the images
            words.append("objective={kind: nft}")
        config: Any = parse_config(merge(SMALLEST, parse_overrides(words)))
        assert f"{config.rollout.group_size} images from" in out
        on_quickstart: Any = load_config("quickstart-grpo", words)
        assert on_quickstart.rollout.tree == config.rollout.tree
        if credit:
            assert on_quickstart.objective.advantage.scale == config.objective.advantage.scale


SMALLEST = {"prompts": {"train": "p.txt"}, "rewards": [{"name": "ocr"}]}
PAGE = (Path(__file__).parents[2] / "docs" / "trees.md").read_text(encoding="utf-8")
