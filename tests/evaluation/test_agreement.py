import json

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

from flowrl.evaluation.agreement import Agreement, measure_agreement
from flowrl.offline.pairs import read_pairs
from flowrl.scoring.spec import RewardSpec


def agreement(right, per_prompt=1):
    prompts = tuple(f"prompt {i // per_prompt}" for i in range(len(right)))
    return Agreement(prompts=prompts, right=tuple(right))


@pytest.mark.parametrize(
    ("right", "pairs", "state"),
    [(0, 5, "problem"), (3, 3, "warning"), (7, 10, "warning"), (10, 10, "ok"), (61, 100, "ok")],
)
def test_the_interval_is_wilsons_and_the_conclusion_is_its(right, pairs, state):
    expected = binomtest(right, pairs).proportion_ci(0.95, method="wilson")
    measured = agreement([1.0] * right + [0.0] * (pairs - right))
    assert measured.interval() == pytest.approx((right / pairs, expected.low, expected.high))
    assert measured.result("judge").state == state and measured.result("judge").remedy
    # Ten pairs of each prompt, all with one outcome, say no more than one of each.
    copies = agreement([x for x in measured.right for _ in range(10)], per_prompt=10)
    assert copies.interval() == pytest.approx(measured.interval())


def test_pairs_are_right_wrong_tied_or_missing_whatever_their_sizes(tmp_path):
    for name, level, height in (("light", 200, 8), ("dark", 50, 12), ("same", 200, 8)):
        Image.new("RGB", (8, height), (level,) * 3).save(tmp_path / f"{name}.png")
    choices = [("light", "dark"), ("dark", "light"), ("light", "same"), ("light", "none")] * 2
    pairs = [(f"p{i}", f"{a}.png", f"{b}.png") for i, (a, b) in enumerate(choices)]
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    source = tmp_path / "pairs.json"
    source.write_text(json.dumps(rows))

    def level(images, prompts, metadata):
        return torch.where(torch.tensor([p == "p0" for p in prompts]), torch.nan, images.mean())

    measured = measure_agreement(RewardSpec(name="level", reward=level), read_pairs(str(source))[0])
    assert measured.prompts == ("p1", "p2", "p4", "p5", "p6")
    assert measured.right == (0.0, 0.5, 1.0, 0.0, 0.5)
    assert "row 1" in measured.missing[0] and "none.png" in measured.missing[1]


def test_reward_check_says_whether_a_judge_agrees_with_people(tmp_path, flowrl):
    for i, level in enumerate((200, 50)):
        Image.new("RGB", (8, 8), (level,) * 3).save(tmp_path / f"{i}.png")
    rows = [{"caption": f"p{i}", "a": "0.png", "b": "1.png", "best": 1} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "{prompt: caption, first: b, second: a, label: best}"
    words = ["--pairs", str(tmp_path / "pairs.jsonl"), "--columns", columns, "--json"]
    code, out, _ = flowrl("reward-check", "brightness", *words)
    result = json.loads(out.splitlines()[-1])
    assert code == 1 and result["detail"].startswith("ranks 0.0% of 9 pairs")
