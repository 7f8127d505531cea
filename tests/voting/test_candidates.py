"""Which images are compared, and in which order."""

import json
import os
from itertools import combinations

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.voting.candidates import next_pair, read_candidates


def test_no_pair_comes_twice_and_prompts_take_turns():
    texts = [f"prompt {row // 4}" for row in range(240)]
    pairs = [pair for i in range(0, 240, 4) for pair in combinations(range(i, i + 4), 2)]
    voted = []
    for _ in range(120):
        voted.append(next_pair(pairs, texts, voted, 0))
    assert len({frozenset(pair) for pair in voted}) == 120
    assert len({texts[a] for a, _ in voted[:60]}) == 60
    assert all(texts[a] == texts[b] for a, b in voted)
    assert 30 < sum(a < b for a, b in voted) < 90  # either image may be the first
    assert next_pair([(0, 1)], texts, [(1, 0)], 0) is None


@pytest.mark.parametrize("name", ["../secret.png", "/dev/zero", "pipe.png", "link.png"])
def test_images_outside_of_the_folder_and_pipes_are_refused(tmp_path, name):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    rows = [{"file_name": file, "prompt": "a cat"} for file in ("a.png", name)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=name.rpartition("/")[2]):
        read_candidates(folder)
