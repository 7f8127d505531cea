import json
import math

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

from flowrl.cli import main
from flowrl.evaluation.agreement import Agreement, measure_agreement
from flowrl.offline.pairs import read_pairs
from flowrl.scoring.spec import RewardSpec


def agreement(right, per_prompt=1):
    prompts = tuple(f"prompt {i // per_prompt}" for i in range(len(right)))
    return Agreement(prompts=prompts, right=tuple(right))


@pytest.mark.parametrize(("right", "pairs"), [(0, 5), (7, 10), (10, 10), (61, 100)])
def test_the_interval_is_wilsons_where_each_pair_has_a_prompt(right, pairs):
    expected = binomtest(right, pairs).proportion_ci(0.95, method="wilson")
    measured = agreement([1.0] * right + [0.0] * (pairs - right))
    assert measured.interval() == pytest.approx((right / pairs, expected.low, expected.high))
    # Ten pairs of each prompt, all with one outcome, say no more than one of each.
    copies = agreement([x for x in measured.right for _ in range(10)], per_prompt=10)
    assert copies.interval() == pytest.approx(measured.interval())
    ties = agreement([0.5] * 2 * right + [0.0] * 2 * (pairs - right))
    assert ties.interval()[0] == pytest.approx(right / pairs / 2)


@pytest.mark.parametrize(
    ("right", "state", "words"),
    [([1.0] * 90 + [0.0] * 10, "ok", ": better"), ([1.0, 0.0] * 20, "warning", "not better"),
     ([1.0] * 3, "warning", "not better"), ([0.0] * 40, "problem", "worse")],
)  # fmt: skip
def test_the_conclusion_follows_from_the_interval(right, state, words):
    result = agreement(right).result("judge")
    assert result.state == state and words in result.detail and result.remedy


def test_pairs_are_counted_right_wrong_tied_and_missing_whatever_their_sizes(tmp_path):
    shades = {"light": 200, "dark": 50, "same": 200}
    for (name, level), size in zip(shades.items(), [(8, 8), (8, 12), (8, 8)], strict=True):
        Image.new("RGB", size, (level,) * 3).save(tmp_path / f"{name}.png")
    choices = [("light", "dark"), ("dark", "light"), ("light", "same"), ("light", "none")]
    rows = [{"prompt": f"p{i}", "chosen": f"{a}.png", "rejected": f"{b}.png"}
            for i, (a, b) in enumerate(choices * 5)]  # fmt: skip
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def level(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        return torch.where(torch.tensor([p == "p0" for p in prompts]), torch.nan, scores)

    pairs, _ = read_pairs(str(source))
    measured = measure_agreement(RewardSpec(name="level", reward=level), pairs)
    assert measured.right == (0.0, 0.5) + (1.0, 0.0, 0.5) * 4 and len(measured.missing) == 6
    assert measured.prompts[:3] == ("p1", "p2", "p4")
    assert "line 1" in measured.missing[0] and "none.png" in measured.missing[1]


def test_reward_check_says_whether_a_judge_agrees_with_people(tmp_path, capsys):
    for i, level in enumerate((200, 50)):
        Image.new("RGB", (8, 8), (level,) * 3).save(tmp_path / f"{i}.png")
    rows = [{"caption": f"p{i}", "a": "0.png", "b": "1.png", "best": 1} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for first, second, code in (("a", "b", 0), ("b", "a", 1)):
        columns = f"{{prompt: caption, first: {first}, second: {second}, label: best}}"
        words = ["--pairs", str(tmp_path / "pairs.jsonl"), "--columns", columns, "--json"]
        with pytest.raises(SystemExit) as end:
            main(["reward-check", "brightness", *words])
        assert int(end.value.code or 0) == code
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        share = "100.0%" if first == "a" else "0.0%"
        assert result["detail"].startswith(f"ranks {share} of 9 pairs")
    assert not math.isnan(result["seconds_p50"])
