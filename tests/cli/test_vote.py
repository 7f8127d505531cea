"""`flowrl vote`: what its first word may name."""

from flowrl.utils.journal import append_line


def test_votes_are_exported_without_a_recipe_and_trained_on_with_one(
    tmp_path, monkeypatch, flowrl, write_images
):
    monkeypatch.chdir(tmp_path)
    folder = write_images(tmp_path / "votes", ["a star"], images=2)
    first, second = (f"00000/samples/{k:04d}.png" for k in range(2))
    vote = {"prompt": "a star", "first": first, "second": second, "choice": "second"}
    append_line(folder / "votes.jsonl", vote)
    code, out, _ = flowrl("vote", "votes", "--export", "pairs.jsonl")
    assert code == 0 and "1 pairs" in out and "chosen" in (tmp_path / "pairs.jsonl").read_text()
    code, _, err = flowrl("vote", "votes", "--train")
    assert code == 1 and "No recipe given" in err
    code, _, err = flowrl(
        "vote", "quickstart", "-o", "votes", "--train", "run.output_dir=runs/mine"
    )
    assert code == 1 and "run.output_dir" in err
