"""Code that pages print runs as it stands: README, CONTRIBUTING, stores, reward servers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowrl.backbones.lora_formats import open_lora
from flowrl.config.rewards import HTTPOptions
from flowrl.config.rollout import SamplingOptions
from flowrl.scoring.check import check_named
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.protocol import Info, Response, ScoreRequest
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.trees.plan import count
from flowrl.trees.presets import CustomTreeOptions

ROOT = Path(__file__).parents[2]


def blocks(path: str, language: str) -> list[str]:
    text = (ROOT / path).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def example(name: str) -> str:
    (text,) = blocks("CONTRIBUTING.md", f"python {name}")
    return text


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the `flowrl` command, unlike `python -m`, starts without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return tmp_path


def test_the_python_of_the_readme_trains_and_its_lora_loads(here):
    use, own = blocks("README.md", "python")
    short = '"run.iterations=1", "evaluation.prompts=null", "pipeline.device=cpu"]'
    assert '"run.iterations=60"]' in own
    exec(own.replace('"run.iterations=60"]', short), {})
    assert any(up.any() for _, up in open_lora("runs/red").layers.values())
    names: dict = {}
    exec(use.replace("runs/quickstart", "runs/red"), names)
    assert (here / "image.png").is_file()
    assert names["settings"]["num_inference_steps"] == 8


def test_the_reward_of_the_guide_is_found_by_its_path_and_prefers_edges(here):
    (here / "my_rewards.py").write_text(example("reward"))
    spec = RewardSpec(name="mine", reward=load_reward("my_rewards:sharpness"))
    images = torch.zeros(2, 3, 8, 8)
    images[1, :, ::2] = 1
    result = score([spec], images, ["", ""], [{}, {}])
    assert result.scores[:, 0].tolist() == pytest.approx([0, 1])
    (finding,) = check_named("my_rewards:sharpness")
    assert finding.state == "ok" and finding.detail.startswith("1 fixture right, repeatable")


def test_the_plan_of_the_guide_is_found_by_its_path(here):
    (here / "my_plans.py").write_text(example("plan"))
    tree = CustomTreeOptions(kind="custom", function="my_plans:widening")
    plans = SamplingOptions(tree=tree, num_inference_steps=8, group_size=4).plans(seed=0)
    for iteration, trained in [(0, 1), (120, 3), (10_000, 7)]:
        plan = plans(iteration)
        assert [step.train for step in plan.steps] == [True] * trained + [False] * (8 - trained)
        assert count(plan).leaves == 4


def test_the_objective_of_the_guide_is_found_by_its_path_and_learns(here, make_learner):
    (here / "my_objectives.py").write_text(example("objective"))
    target = {"target": "my_objectives:AdvantageMatching", "args": {"kl_coef": 0.5}}
    learner = make_learner(
        objective={"kind": "custom"} | target,
        rollout={"tree": {"kind": "ode"}},
    )
    assert learner.objective.kl_coef == 0.5
    before = [p.clone() for p in learner.policy.parameters()]
    first, second = (learner.iterate(i)[1] for i in range(2))
    assert first["policy/kl"] == 0 and second["policy/kl"] > 0
    assert first["endpoints/images"] == 8 and first["grad/norm"] > 0
    assert not all(map(torch.equal, before, learner.policy.parameters()))


# --- docs/reward-servers.md ---------------------------------------------------------------------

STAND_IN = """
import reward_server

class Brightness:
    def __call__(self, image, prompt):
        if prompt == "none":
            return None
        return float(image.mean()) / 255

def score(model, images, prompts, metadata):
    if "bad" in prompts:
        raise RuntimeError("no face")
    return [model(x, p) for x, p in zip(images, prompts)]

reward_server.load = Brightness
reward_server.score = score
reward_server.main(0)
"""


@pytest.fixture
def url(tmp_path):
    """The page's server, as it stands, with another model in it."""
    (tmp_path / "reward_server.py").write_text(blocks("docs/reward-servers.md", "python server")[0])
    (tmp_path / "mine.py").write_text(STAND_IN)
    command, pipe = [sys.executable, "mine.py"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


def test_the_server_scores_a_run_tells_what_is_missing_and_lives_on(url):
    remote = HTTPExecutor("imagereward", HTTPOptions(urls=[url], micro_batch=4, deadline=20))
    images = torch.rand(10, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    images = images.mul(255).round() / 255
    scores, reasons = remote(images, ["p"] * 10, [{"a": [1]}] * 10)
    torch.testing.assert_close(scores, images.mean((1, 2, 3)))
    assert not reasons and remote.version == "ImageReward-v1.0/35 tokens"
    remote.close()
    remote = HTTPExecutor("imagereward", HTTPOptions(urls=[url], micro_batch=1, deadline=20))
    scores, reasons = remote(torch.ones(3, 3, 4, 4), ["bad", "none", "p"], [{}] * 3)
    remote.close()
    assert scores.isnan().tolist() == [True, True, False] and scores[2] == 1.0
    assert "RuntimeError: no face" in reasons[0] and "the model gave no number" in reasons[1]


def test_the_messages_of_the_page_are_those_of_the_protocol():
    info, request, response = map(json.loads, blocks("docs/reward-servers.md", "json"))
    assert Info.model_validate(info).model_dump(mode="json") == info
    assert ScoreRequest.model_validate(request).model_dump(mode="json") == request
    assert Response.model_validate(response).model_dump(mode="json") == response
