"""A run ends when its reward rises at the cost of one that is only measured, and stays so."""

import math
import re
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from crashes import SMALLEST
from safetensors.torch import load_file

from flowrl.api import align
from flowrl.backbones.lora_formats import FILE
from flowrl.config.sections import OnHackingOptions
from flowrl.errors import UserError
from flowrl.export.summary import card
from flowrl.functional.image_statistics import STATISTICS
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec
from flowrl.training.checkpoint import Checkpoints, read_checkpoint
from flowrl.training.evaluate import Evaluation
from flowrl.training.hacking import HackingRule, Judged, hacked_since, hacking_rule
from flowrl.training.ledger import Ledger
from flowrl.training.loop import train
from flowrl.training.radar import HackingScore
from flowrl.training.tracking import read_metrics

NAN = math.nan


def options_of(held_out: str) -> OnHackingOptions:
    return OnHackingOptions(held_out=held_out, patience=2)


RULE = HackingRule(options=options_of("quality"))


def judged(history: dict[int, tuple[float, float]]) -> dict[int, Judged]:
    """(trained score, held-out score) by iteration."""
    return {
        step: Judged(trained=trained, quality=quality, hacking=HackingScore())
        for step, (trained, quality) in history.items()
    }


def test_a_reason_has_both_scores_from_the_best_evaluation_on_and_passes_over_missing_ones():
    history = {0: (0.1, 3.0), 2: (0.2, 4.0), 4: (0.3, 3.5), 6: (0.4, 3.25)}
    reason = RULE.reason(judged(history))
    assert re.search(r"since iteration 2 .* from 0\.2 to 0\.4.* from 4 to 3\.25", reason)
    assert RULE.reason(dict(reversed(judged(history).items()))) == reason
    history = {0: (0.1, 3.0), 2: (0.2, NAN), 4: (0.3, 2.5), 6: (0.4, 2.0), 8: (NAN, 9.0)}
    assert re.search("since iteration 0 .* from 3 to 2", RULE.reason(judged(history)))
    assert RULE.reason({}) == RULE.reason(judged({0: (0.1, NAN), 2: (0.2, NAN)})) == ""
    # Where less is better a rise is the harm.
    rule = replace(RULE, sign=-1.0)
    made = evaluation(torch.tensor([[5.0], [7.0]]), ("quality",))
    assert [r.quality(made, 0.5, HackingScore()) for r in (rule, RULE)] == [-6, 6]
    assert "from 3 to 5" in rule.reason(judged({0: (0.1, -3.0), 2: (0.2, -4.0), 4: (0.3, -5.0)}))


def evaluation(scores: torch.Tensor, names: tuple[str, ...], key: str = "") -> Evaluation:
    return Evaluation(
        scores=scores, names=names, images=torch.empty(0), prompts=(), draws=(), key=key,
        prompt=torch.arange(len(scores)), statistics=torch.zeros(len(scores), len(STATISTICS)),
        thumbnails=torch.zeros(len(scores), 3, 8, 8),
    )  # fmt: skip


def spec(name: str, **options) -> RewardSpec:
    return RewardSpec(name=name, reward=lambda images, *_: [0.0] * len(images), **options)


def test_the_rule_watches_a_reward_that_is_only_measured_beside_trained_ones_that_are():
    """Every trained reward has a score to compare; the radar alone needs no other."""

    def ocr(images, prompts, metadata):
        return [0.0] * len(images)

    ocr.required_metadata = ("ocr_text",)
    plain = PromptRecord(uid="a", text="a")
    text = PromptRecord(uid="b", text="b", metadata={"ocr_text": "B"})
    taste, quality = spec("taste"), spec("quality", held_out=True)
    flaws, rollout = spec("flaws", held_out=True, weight=-1), spec("ocr", when="rollout")

    def made(held_out, *specs, prompts=(plain,)):
        options = OnHackingOptions() if held_out is None else options_of(held_out)
        return hacking_rule(options, [*specs], [*prompts])

    assert made("flaws", taste, flaws).sign == -1 and made(None, taste).sign == 1
    for options in ({"weight": 0.0}, {"held_out": True}):
        assert (
            made("quality", taste, quality, RewardSpec(name="ocr", reward=ocr, **options)) == RULE
        )
    trained = RewardSpec(name="ocr", reward=ocr)
    assert made("quality", taste, quality, trained, prompts=[plain, text]) == RULE
    for held_out, specs, prompts, message in (
        (
            "taste",
            (taste, quality, flaws),
            [plain],
            "on_hacking.held_out is 'taste'.*quality, flaws",
        ),
        ("beauty", (taste, quality), [plain], "on_hacking.held_out is 'beauty'.*quality"),
        ("quality", (taste, quality), [], "none of the 0 held-out prompts"),
        ("quality", (taste, quality, trained), [plain], "'ocr' applies to none of the 1 held-out"),
        (None, (rollout, quality), [plain], "run.on_hacking"),
        (None, (taste,), [], "'taste' applies to none"),
    ):
        with pytest.raises(UserError, match=message):
            made(held_out, *specs, prompts=prompts)


HELD_OUT = [0.2, 0.5, 0.4, 0.3]


def test_hacking_is_a_rising_reward_below_the_best_held_out_score():
    for trained, held_out, patience, hacking in [
        ([0, 1, 2, 3], HELD_OUT, 2, True),
        ([0, 1, 2, 3], HELD_OUT, 3, False),  # the best itself is among the last three
        ([0, 1, 1, 3], HELD_OUT, 2, False),  # the reward had not risen yet
        ([0, 1, 1, 3], HELD_OUT, 1, True),
        ([0, 1, 2, 0.5], HELD_OUT, 1, False),  # both fell: not hacked, only worse
        ([0, 1, 2, 3], [0.2, 0.3, 0.4, 0.5], 1, False),
        ([0, 1, 2, 3], [0.5, 0.5, 0.5, 0.5], 1, False),  # the latest best counts
        ([0, 3, 2], [0.5, 0.5, 0.4], 1, False),
        ([0, 1, 2, 3], [0.2, 0.5, 0.4, 0.5], 2, False),
        ([5, 1, 2, 3], HELD_OUT, 2, True),  # compared with the score at the best, not the highest
        ([0, 1], [1, 0], 1, True),
        ([0], [1], 1, False),
        ([], [], 1, False),
    ]:
        scores = [*zip(trained, held_out, strict=True)]
        assert (hacked_since(scores, patience) is not None) is hacking


# --- in a run ------------------------------------------------------------------------------------

# At each iteration that evaluates: (trained, held out). The held-out one is best at 2.
SCORES = {0: (0.1, 3.0), 1: (0.2, 3.5), 2: (0.3, 4.0), 3: (0.4, 3.8), 4: (0.5, 3.6), 5: (0.6, 1.0)}


@dataclass
class Scripted:
    """An evaluator whose scores are given by the iteration that a run has reached; first the
    base's, if the run does not know them."""

    run: Any = None
    backbone: Any = None
    calls: list[int] = field(default_factory=list)
    key: str = "scripted"
    origin: str = ""
    prompts: tuple = ()
    title: str = ""

    def __call__(self, velocity, runtime, of="", *, whole=True) -> Evaluation:
        step = self.run.done if self.run._base_is_evaluated() else 0
        self.calls.append(step)
        return evaluation(torch.tensor([SCORES[step]]), ("brightness", "quality"), self.key)


@pytest.fixture
def scripted(make_run):
    """A learner and its run, whose evaluations are scripted; `resume` is a checkpoint's state."""

    def make(resume: dict | None = None, *, rule=RULE, **changes):
        config, learner, made = make_run(
            resume,
            evaluator=(evaluator := Scripted()),
            evaluation={"prompts": "tiny:colors:test", "num_images": 1, "every": 1},
            run={"iterations": 6, "checkpoint_every": 1, "keep_checkpoints": 1, "sample_every": 1},
            **{"rollout": SMALLEST} | changes,
        )
        evaluator.run, evaluator.backbone, made.hacking = made, learner.policy.backbone, rule
        return config, learner, made

    return make


def trained(learner, run, iterations: int = 6):
    with run.session():
        train(learner, run, iterations=iterations)
    return run


def state_of(folder, step: str | int = "latest") -> dict:
    found = Checkpoints(folder, keep=1)
    return read_checkpoint(found.path(found.steps()[-1] if step == "latest" else int(step)))


def test_it_stops_after_the_last_bad_evaluation_saves_and_says_why(scripted, capsys):
    """And keeps the checkpoint that the held-out reward rates highest, and stays stopped."""
    config, learner, run = scripted()
    trained(learner, run)
    assert run.done == 4 and run.stopped.startswith("Stopped at iteration 4")
    assert state_of(run.folder)["iteration"] == 4
    assert run.stopped in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(run.folder)] == [0, 1, 2, 3, 4]
    made = card(config, learner, run, [], [])
    assert made.stopped == run.stopped
    assert run.best == (4.0, 2)
    assert run.stopped.endswith("The best checkpoint by that reward is step-000002.")
    kept = sorted(p.name for p in (run.folder / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000004"]
    # The weights of one iteration are evaluated once.
    before = list(run.evaluator.calls)
    assert run.evaluate_policy() is run.evaluate_policy()
    assert run.evaluator.calls == before == [0, 1, 2, 3, 4]
    _, learner, run = scripted(state_of(run.folder))
    trained(learner, run)
    assert run.done == 4 and run.stopped and run.evaluator.calls == []
    _, learner, run = scripted(state_of(run.folder), rule=None)
    trained(learner, run)
    assert run.done == 6


def test_a_resumed_run_knows_the_evaluations_before_it(scripted):
    """Killed after the third iteration: only one bad evaluation is still to come."""
    _, learner, run = scripted()
    trained(learner, run, iterations=3)
    _, learner, run = scripted(state_of(run.folder))
    trained(learner, run)
    assert run.evaluator.calls == [4]
    assert run.done == 4 and "since iteration 2" in run.stopped and run.best == (4.0, 2)


CHAINS = {"objective": {"kind": "grpo"}, "rollout": SMALLEST | {"tree": {"kind": "flow_grpo"}}}


def rule_that(action: str, **changes) -> HackingRule:
    return replace(RULE, options=RULE.options.model_copy(update={"action": action} | changes))


def lora(folder) -> dict:
    return load_file(folder / FILE)


def test_a_rollback_ends_with_the_weights_that_the_held_out_reward_rates_highest(scripted):
    _, learner, run = scripted(rule=rule_that("rollback"))
    trained(learner, run)
    assert run.done == 4 and "The weights are again those of step-000002" in run.stopped
    ended, best = lora(run.folder), lora(run.checkpoints.path(2))
    assert ended.keys() == best.keys() and all(torch.equal(ended[k], best[k]) for k in best)
    _, learner, run = scripted(state_of(run.folder), rule=rule_that("rollback"))
    trained(learner, run)
    assert run.done == 4 and run.stopped and run.rollbacks == [(2, 4)]
    _, learner, run = scripted(state_of(run.folder), rule=None)
    assert trained(learner, run).done == 6


def test_a_raised_penalty_trains_on_from_the_best_weights_and_survives_a_resume(scripted):
    """The penalty is in force after the fourth iteration; a resumed run equals a whole one."""
    without = CHAINS | {"objective": {"kind": "grpo", "kl_coef": 0}}

    def ended(*stops: int):
        state = None
        for stop in (*stops, 6):
            _, learner, run = scripted(state, rule=rule_that("raise_kl"), **without)
            trained(learner, run, iterations=stop)
            state = state_of(run.folder)
        return run

    run = ended()
    assert run.done == 6 and run.rollbacks == [(2, 4)] and run.kl_coef == 0.1
    assert not run.stopped
    rows = [row for row in read_metrics(run.folder) if "loss" in row]
    assert ["policy/kl" in row for row in rows] == [False] * 4 + [True] * 2
    whole = lora(run.folder)
    shutil.rmtree(run.folder)
    resumed = lora(ended(5).folder)
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


def test_raised_penalties_grow_and_end_with_a_rollback(scripted, monkeypatch):
    monkeypatch.setitem(SCORES, 0, (0.0, 9.0))  # the base stays the best
    rule = rule_that("raise_kl", patience=1)
    _, learner, run = scripted(rule=rule, **CHAINS)
    trained(learner, run)
    assert run.rollbacks == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert [rule.kl_coef(n) for n in range(4)] == pytest.approx([None, 0.1, 0.4, 1.6])
    assert run.done == 4 and "step-000000" in run.stopped
    assert all(not t.any() for name, t in lora(run.folder).items() if "lora_B" in name)


# --- by the radar alone --------------------------------------------------------------------------

LOOKS = {0: 0.0, 1: 0.1, 2: 0.5, 3: 4.0, 4: 5.0, 5: 6.0}  # its largest value, by iteration


def by_radar(action: str = "rollback", **changes) -> HackingRule:
    options = OnHackingOptions(action=action, **{"patience": 2} | changes)
    return HackingRule(options=options)


@pytest.fixture
def watched(scripted):
    """The same run, whose radar sees LOOKS; the trained score rises all along."""

    def make(resume: dict | None = None, *, rule: HackingRule, **changes):
        config, learner, run = scripted(resume, rule=rule, **changes)

        def look(base: Evaluation, now: Evaluation) -> HackingScore:
            assert base.mean("brightness") == pytest.approx(SCORES[0][0])
            trained = now.mean("brightness")
            value = next(
                LOOKS[k] for k, (score, _) in SCORES.items() if abs(score - trained) < 1e-6
            )
            reasons = ("saturation rose",) if value > 1 else ()
            return HackingScore(values={"drift/saturation": value}, reasons=reasons)

        run.radar = look
        return config, learner, run

    return make


def test_images_that_look_hacked_end_the_run_at_the_last_weights_that_did_not(watched, capsys):
    _, learner, run = watched(rule=by_radar())
    trained(learner, run)
    assert run.done == 4 and run.rollbacks == [(2, 4)] and run.best == (pytest.approx(0.3), 2)
    assert "saturation rose" in run.stopped and "those of step-000002" in run.stopped
    ended, best = lora(run.folder), lora(run.checkpoints.path(2))
    assert all(torch.equal(ended[k], best[k]) for k in best)
    rows = {row["step"]: row.get("hacking/score") for row in read_metrics(run.folder)}
    expected = {k: v / (1 + v) for k, v in LOOKS.items() if 0 < k < 5}
    assert rows == pytest.approx(expected | {0: None})
    # The first evaluation that looks so is announced, each is in the ledger.
    assert capsys.readouterr().out.count("may be hacking its reward") == 1
    events = [e["step"] for e in run.ledger.events() if e["event"] == "hacking"]
    assert events == [3, 4]
    _, learner, run = watched(state_of(run.folder), rule=by_radar())
    assert trained(learner, run).done == 4


def test_the_base_comes_back_where_every_evaluation_looked_hacked(watched, monkeypatch):
    for step in (1, 2):
        monkeypatch.setitem(LOOKS, step, 9.0)
    _, learner, run = watched(rule=by_radar())
    trained(learner, run)
    assert run.done == 2 and run.rollbacks == [(0, 2)] and run.best[1] == 0
    assert all(not t.any() for name, t in lora(run.folder).items() if "lora_B" in name)


def test_the_base_is_no_evaluation_in_a_row_and_a_better_one_begins_anew(watched, monkeypatch):
    monkeypatch.setitem(LOOKS, 4, 0.5)
    _, learner, run = watched(rule=by_radar())
    assert trained(learner, run).done == 6 and run.best == (pytest.approx(0.5), 4)


def test_a_resumed_run_looks_at_the_evaluations_before_it(watched):
    _, learner, run = watched(rule=by_radar())
    trained(learner, run, iterations=3)
    assert not run.stopped
    _, learner, run = watched(state_of(run.folder), rule=by_radar())
    trained(learner, run)
    assert run.evaluator.calls == [4] and run.rollbacks == [(2, 4)]


@pytest.mark.slow
def test_a_run_that_games_brightness_is_seen_and_returns_to_the_weights_before(
    tiny_config, tmp_path
):
    """Its images lose what they show: at this rate within a few iterations."""
    align(tiny_config(
        run={
            "iterations": 8, "output_dir": str(tmp_path / "run"),
            "on_hacking": {"action": "rollback", "patience": 1},
        },
        evaluation={
            "prompts": "tiny:colors:test", "num_images": 12, "every": 1, "num_inference_steps": 4,
        },
        optim={"lr": 2e-2}, objective={"kind": "align_prop"}, rollout={"tree": {"kind": "ode"}},
    ))  # fmt: skip
    folder = tmp_path / "run"
    (rollback,) = [e for e in Ledger(folder).events() if e["event"] == "rollback"]
    assert rollback["step"] < 8 and Ledger(folder).last("stop")["reason"] == "hacking"
    assert Ledger(folder).last("hacking")["step"] == rollback["step"]
    ended = lora(folder)
    best = lora(Checkpoints(folder, keep=1).path(rollback["to"]))
    assert all(torch.equal(ended[k], best[k]) for k in best)
    # The last evaluation is of these weights.
    last = [row["hacking/score"] for row in read_metrics(folder) if "hacking/score" in row][-1]
    assert last <= 0.5 and f"Hacking score {last:.2f}" in (folder / "README.md").read_text()


def test_a_warning_changes_nothing_but_the_output(scripted, capsys):
    _, learner, run = scripted(rule=rule_that("warn"))
    trained(learner, run)
    assert run.done == 6 and not run.stopped and not run.rollbacks
    assert "Iteration 4, run.on_hacking: since iteration 2" in capsys.readouterr().out
