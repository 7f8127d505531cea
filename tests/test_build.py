"""What cannot work is refused while the run is put together, before anything is drawn."""

import pytest

from flowrl.errors import UserError
from flowrl.runtime import Runtime


def test_two_rewards_of_one_name_are_refused(make_learner):
    specs = [
        {"name": "geneval", "args": {"mode": "strict"}},
        {"name": "geneval", "args": {"mode": "strict", "compat": "flow_grpo"}},
    ]
    with pytest.raises(UserError, match="two rewards are called 'geneval_strict'"):
        make_learner(specs=specs)


def test_fewer_pictures_than_processes_are_refused(make_learner, monkeypatch):
    monkeypatch.setattr(Runtime, "world_size", 9)
    with pytest.raises(UserError, match="8 trees cannot be shared among 9 processes"):
        make_learner()


def test_held_out_prompts_without_any_score_are_refused(make_learner, tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\n")
    with pytest.raises(UserError, match="evaluation.prompts"):
        make_learner(
            specs=[{"name": "geneval"}], evaluation={"prompts": str(tmp_path / "mine.txt")}
        )
