"""`flowrl vote`: what its first word may name."""

import json

from PIL import Image

from flowrl.utils.journal import append_line


def write_votes(folder):
    samples = folder / "00000" / "samples"
    samples.mkdir(parents=True)
    (folder / "00000" / "metadata.jsonl").write_text(json.dumps({"prompt": "a star"}) + "\n")
    for k in range(2):
        Image.new("RGB", (8, 8), (k, k, k)).save(samples / f"{k:04d}.png")
    names = [f"00000/samples/{k:04d}.png" for k in range(2)]
    vote = {"prompt": "a star", "first": names[0], "second": names[1], "choice": "second"}
    append_line(folder / "votes.jsonl", vote)


def test_votes_are_exported_without_a_recipe_and_trained_on_with_one(tmp_path, monkeypatch, flowrl):
    monkeypatch.chdir(tmp_path)
    write_votes(tmp_path / "votes")

    code, out, _ = flowrl("vote", "votes", "--export", "pairs.jsonl")
    assert code == 0 and "1 pairs" in out and "chosen" in (tmp_path / "pairs.jsonl").read_text()
    code, _, err = flowrl("vote", "votes", "--train")
    assert code == 1 and "No recipe given" in err
    code, _, err = flowrl(
        "vote", "quickstart", "-o", "votes", "--train", "run.output_dir=runs/mine"
    )
    assert code == 1 and "run.output_dir" in err
