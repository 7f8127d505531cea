"""What a start goes on from: its own run, the next number, or nothing; and what it refuses."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from flowrl.api import align
from flowrl.assembly.learner import ProvidedObjects
from flowrl.assembly.start import recipe_facts
from flowrl.backbones.lora_files import FILE
from flowrl.errors import DamagedFile, UserError
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints
from flowrl.training.ledger import Ledger
from flowrl.training.resume import AUTO, LATEST, decide
from flowrl.training.tracking import read_metrics

ITERATIONS = 2


@pytest.fixture(scope="module")
def config_for(tiny_config, tmp_path_factory):
    few = tmp_path_factory.mktemp("prompts") / "prompts.txt"  # which are read soon
    few.write_text("a red circle\na blue square\na green star\n")

    def make(folder: Path, **changes):
        changes = {"prompts": {"train": str(few)}} | changes
        rollout = {"prompts_per_iteration": 1, "group_size": 2, "num_inference_steps": 2}
        run = {"output_dir": str(folder), "iterations": ITERATIONS, "keep_checkpoints": 9}
        for section, values in {"rollout": rollout, "run": run}.items():
            changes[section] = values | changes.get(section, {})
        return tiny_config(**changes)

    return make


@pytest.fixture(scope="module")
def finished(config_for, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    align(config_for(folder))
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """A moved copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def start(config, resume: str | None = AUTO, accept: bool = False, **given):
    facts = recipe_facts(config, ProvidedObjects(**given))
    return decide(config, facts, resume=resume, accept_changes=accept)


def contents(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- a rerun -------------------------------------------------------------------------------------


def test_a_rerun_of_a_finished_run_says_so_and_touches_nothing(copy, config_for, caplog):
    caplog.set_level("INFO")
    before = contents(copy)
    assert align(config_for(copy)).comparisons == []
    assert contents(copy) == before
    assert f"{copy} holds this recipe's finished run of 2 iterations" in caplog.text


def test_a_rerun_of_a_finished_run_returns_what_it_measured(config_for, tmp_path):
    evaluation = {"prompts": "tiny:geneval:test", "num_images": 2, "num_inference_steps": 1}
    config = config_for(tmp_path / "run", evaluation=evaluation)
    first = align(config).comparisons
    assert first and align(config).comparisons == first
    for path in (tmp_path / "run" / "evaluations").glob("*-000000.safetensors"):
        path.write_bytes(b"damaged")
    assert align(config).comparisons == []


def test_another_recipe_gets_the_next_number_and_finds_it_again(copy, config_for, caplog):
    other = config_for(copy, optim={"lr": 5e-3}, run={"iterations": 1})
    align(other)
    assert "optim.lr was 0.01, now 0.005" in caplog.text
    second = copy.with_name("run-2")
    assert f"this run goes to {second}" in caplog.text
    assert yaml.safe_load((second / CONFIG).read_text())["run"]["output_dir"] == str(second)
    assert Checkpoints(copy, keep=1).steps() == [0, 1, 2]
    assert start(other).finished and start(other).folder == second
    third = start(config_for(copy, optim={"lr": 1e-3}))
    assert third.folder == copy.with_name("run-3") and not third.holds_run
    measured = start(config_for(copy, evaluation={"seed": 5}))
    assert measured.folder == copy.with_name("run-3")  # it would be measured otherwise


def test_what_a_rerun_cannot_see_in_the_options_is_another_recipe_too(config_for, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a dog\na cat\n")
    config = config_for(tmp_path / "run", prompts={"train": str(prompts)})
    mine = {"mine": lambda images, *_: images.mean((1, 2, 3))}
    align(config, rewards=mine)
    assert start(config, rewards=mine).finished
    assert start(config).folder == tmp_path / "run-2"
    prompts.write_text("a dog\na mouse\n")
    assert start(config, rewards=mine).folder == tmp_path / "run-2"
    with pytest.raises(UserError, match=r"prompts.train \(content\) was .*--accept-changes"):
        start(config, LATEST, rewards=mine)


def test_a_time_limit_that_is_over_is_an_end_until_it_is_raised(config_for, tmp_path):
    limited = config_for(tmp_path / "run", run={"max_minutes": 1e-6})
    align(limited)
    assert "run.max_minutes" in start(limited).finished
    longer = start(config_for(tmp_path / "run", run={"max_minutes": 60.0}))
    assert longer.state["iteration"] == 1 and not longer.finished


def test_more_iterations_of_a_moved_run_go_on_from_each_of_its_checkpoints(copy, config_for):
    config = config_for(copy, run={"iterations": 5, "max_minutes": 3.0, "threads": 1})
    for resume in (AUTO, LATEST, str(copy)):
        found = start(config, resume)
        assert found.checkpoint == copy / "checkpoints" / "step-000002" and not found.finished
        assert found.state["iteration"] == 2
    assert start(config, str(copy / "checkpoints" / "step-000001")).state["iteration"] == 1


# --- what is refused -----------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_refused_and_both_stay_as_they_are(
    copy, config_for, tmp_path
):
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    before = contents(tmp_path)
    for folder in (copy, tmp_path / "new"):
        for path in (other, other / "checkpoints" / "step-000001"):
            with pytest.raises(UserError, match=f"cannot resume from {path}.*run.output_dir"):
                align(config_for(folder), resume=str(path))
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()


def test_there_is_nothing_to_resume_where_no_run_is(config_for, tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        align(config_for(tmp_path / "new"), resume=LATEST)
    with pytest.raises(UserError, match="cannot resume from"):
        align(config_for(tmp_path / "new"), resume=str(tmp_path / "elsewhere"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "section, values, said",
    [
        ("optim", {"lr": 5e-3}, "optim.lr was 0.01, now 0.005"),
        ("rewards", [{"name": "tiny_quality"}], 'rewards.0.name was "brightness"'),
        ("prompts", {"train": "tiny:colors:train"}, "prompts.train was"),
        ("objective", {"kind": "sft"}, 'objective.kind was "grpo", now "sft"'),
    ],
)
def test_a_resume_names_what_differs_and_asks(copy, config_for, section, values, said):
    changed = config_for(copy, **{section: values})
    before = contents(copy)
    with pytest.raises(UserError, match="--accept-changes") as caught:
        align(changed, resume=LATEST)
    assert said in str(caught.value) and "rank" not in str(caught.value)
    assert contents(copy) == before
    accepted = start(changed, LATEST, accept=True)
    assert accepted.state["iteration"] == 2 and accepted.changed


def test_accepted_changes_are_in_force_and_in_the_ledger(copy, config_for):
    changed = config_for(copy, optim={"lr": 5e-3}, run={"iterations": 3})
    align(changed, resume=LATEST, accept_changes=True)
    assert Ledger(copy).last("resume")["changed"]["optim.lr"] == [0.01, 0.005]
    assert start(changed).finished and start(changed, LATEST).state["iteration"] == 3


def test_what_is_only_measured_or_computed_otherwise_needs_no_word(copy, config_for):
    rollout, optim = {"batch_size": 2}, {"micro_batch": 2}
    thread = {"kind": "inline", "background": True}
    rewards = [{"name": "brightness", "executor": thread}]
    evaluation = {"seed": 5, "num_images": 7}
    config = config_for(
        copy, rollout=rollout, optim=optim, rewards=rewards, evaluation=evaluation,
        runtime={"shard": "node", "timeout": 60.0},
    )  # fmt: skip
    assert start(config, LATEST).state["iteration"] == 2


def test_iterations_are_part_of_a_recipe_whose_learning_rate_falls_over_them(config_for, tmp_path):
    optim, run = {"schedule": "linear"}, {"iterations": 1}
    align(config_for(tmp_path / "run", optim=optim, run=run))
    longer = config_for(tmp_path / "run", optim=optim)
    assert start(longer).folder == tmp_path / "run-2"
    with pytest.raises(UserError, match="optim.schedule over run.iterations was 1, now 2"):
        start(longer, LATEST)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_offered(
    copy, finished, config_for, caplog
):
    path = copy / "checkpoints" / "step-000002" / STATE
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    config = config_for(copy, run={"iterations": 3})
    for resume in (AUTO, str(path.parent)):
        with pytest.raises(DamagedFile, match=f"{path} is damaged.*--resume latest"):
            align(config, resume=resume)
    align(config_for(copy), resume=LATEST)
    assert f"{path} is damaged" in caplog.text
    assert "resuming from the checkpoint before it" in caplog.text
    assert (copy / FILE).read_bytes() == (finished / FILE).read_bytes()
    (aside,) = (copy / "set-aside").iterdir()
    assert (aside / "checkpoints" / "step-000002" / STATE).read_bytes() == bytes(data)


# --- what stays ----------------------------------------------------------------------------------


def test_going_back_sets_later_checkpoints_and_metrics_aside(copy, finished, config_for):
    later = contents(copy / "checkpoints" / "step-000002")
    align(config_for(copy), resume=str(copy / "checkpoints" / "step-000001"))
    aside = copy / "set-aside" / "001-after-step-000001"
    assert contents(aside / "checkpoints" / "step-000002") == later
    assert [line["step"] for line in read_metrics(aside)] == [1, 2]
    assert [line["step"] for line in read_metrics(copy)] == [1, 2]
    assert (copy / FILE).read_bytes() == (finished / FILE).read_bytes()
    assert Ledger(copy).last("aside")["to"] == "set-aside/001-after-step-000001"


def test_weights_that_are_not_finite_are_never_saved(finished, make_run, monkeypatch):
    from flowrl.training.loop import Learner, train

    whole = Learner.iterate

    def breaking(self, iteration):
        done = whole(self, iteration)
        if iteration == 1:
            self.policy.parameters()[3].data[0, 0] = torch.inf
        return done

    monkeypatch.setattr(Learner, "iterate", breaking)
    _, learner, run = make_run(run={"checkpoint_every": 1})
    with pytest.raises(UserError, match="not finite after iteration 2"), run.session():
        train(learner, run, iterations=3)
    assert run.checkpoints.steps() == [0, 1]
    saved = (run.checkpoints.path(1) / FILE).read_bytes()
    assert (run.folder / FILE).read_bytes() == saved
    assert run.ledger.last("stop")["reason"] == "error"
