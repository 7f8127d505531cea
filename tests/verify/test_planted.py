"""`flowrl verify` finds planted faults, and passes what is good."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import planted
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrl.api import align, collect
from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.lora_formats import FILE, METADATA
from flowrl.backbones.policy import POLICY
from flowrl.cli import main
from flowrl.config import Config
from flowrl.offline.format import latents_file, rows_file
from flowrl.scoring.spec import RewardSpec
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints
from flowrl.utils.digests import SEAL
from flowrl.utils.files import load_state, save_state
from flowrl.verify.backbone import check_backbone
from flowrl.verify.files import check_lora, check_store
from flowrl.verify.objective import check_objective_on
from flowrl.verify.recipe import check_reward_contract, verify_recipe
from flowrl.verify.run import verify_run


def topics(results):
    """Of what is wrong, by topic."""
    found = {}
    for result in results:
        if result.state == "problem":
            found.setdefault(result.topic, result.detail)
    return found


# --- backbones ----------------------------------------------------------------------------------

SAMPLE = (planted.RowsMixed, planted.WrongSign)


def some(faults, sample):
    """The first in the default tests, all with --slow."""
    marks = {fault: () if fault in sample else pytest.mark.slow for fault in faults}
    return [pytest.param(f, marks=marks[f], id=f.__name__) for f in faults]


def backbone_problems(make, load_tiny):
    pipeline = load_tiny()
    return topics(
        check_backbone(
            lambda guidance: make(pipeline, guidance=guidance, max_sequence_length=12), 1.0
        )
    )


@pytest.mark.parametrize("fault", some(planted.BACKBONES, SAMPLE))
def test_a_backbones_fault_is_found(fault, load_tiny):
    assert planted.BACKBONES[fault] in backbone_problems(fault, load_tiny)


@pytest.mark.parametrize("good", some((planted.GoodBackbone, planted.OwnGuidance), ()))
def test_a_good_backbone_passes(good, load_tiny):
    assert backbone_problems(good, load_tiny) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "sana"])
def test_good_backbones_of_other_families_pass(family, load_tiny):
    from flowrl.assembly.backbone import BACKBONES

    pipeline, make = load_tiny("fp32", family), BACKBONES[family]
    results = check_backbone(lambda g: make(pipeline, guidance=g, max_sequence_length=12), 1.0)
    assert topics(results) == {}


# --- rewards ------------------------------------------------------------------------------------


def reward_results(reward):
    spec = RewardSpec(name=reward.__name__, reward=reward)
    return list(check_reward_contract(spec, (), (32, 32)))


def test_a_rewards_fault_is_found():
    for reward in planted.REWARDS:
        assert topics(reward_results(reward)), reward


def test_a_missing_score_without_a_reason_is_pointed_out():
    (warning,) = [r for r in reward_results(planted.silent) if r.state == "warning"]
    assert "no score and no reason" in warning.detail


def test_good_rewards_pass():
    for reward in (planted.redness, planted.with_reasons):
        assert {result.state for result in reward_results(reward)} == {"ok"}, reward


# --- objectives ---------------------------------------------------------------------------------


@pytest.fixture
def objective_problems(make_learner):
    def check(objective, *, steps=False):
        tree = {"kind": "flow_grpo" if steps else "ode"}
        rollout = {"num_inference_steps": 3, "tree": tree}
        learner = make_learner(rollout=rollout, objective={"kind": "grpo" if steps else "sft"})
        learner = replace(learner, objective=objective)
        return topics(check_objective_on(learner, "flow_sde"))

    return check


SAMPLE_OBJECTIVES = (planted.WrongDirection,)


@pytest.mark.parametrize("fault", some(planted.OBJECTIVES, SAMPLE_OBJECTIVES))
def test_an_objectives_fault_is_found(fault, objective_problems, make_learner):
    steps = fault in planted.ON_STEPS
    from flowrl.verify.figures import guarded

    tree = {"kind": "flow_grpo" if steps else "ode"}
    rollout = {"num_inference_steps": 3, "tree": tree}
    learner = make_learner(rollout=rollout, objective={"kind": "grpo" if steps else "sft"})
    learner = replace(learner, objective=fault())
    found = topics(guarded("objective", lambda: check_objective_on(learner, "flow_sde")))
    assert planted.OBJECTIVES[fault] in found, found


@pytest.mark.slow
def test_good_objectives_pass(objective_problems):
    assert objective_problems(planted.Weighted()) == {}
    assert objective_problems(planted.grpo(kl_coef=0.1), steps=True) == {}
    assert objective_problems(planted.grpo(ratio="normalised"), steps=True) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["nft", "dpo", "gdro", "lair", "dgpo", "kto", "awm", "rwr", "sft", "refl", "srpo"]
)
def test_flowrls_own_objectives_pass(kind, make_learner):
    noising = {"noising": {"count": 2}} if kind in ("awm", "nft") else {}
    rollout = {"num_inference_steps": 4, "tree": {"kind": "ode"}}
    learner = make_learner(rollout=rollout, objective={"kind": kind} | noising)
    assert topics(check_objective_on(learner, "flow_sde")) == {}


# --- files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_config, load_tiny, tmp_path_factory):
    """A run of three iterations with an evaluation, and checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config: Config = tiny_config(
        run={"iterations": 3, "checkpoint_every": 1, "output_dir": str(folder), "sample_every": 0,
             "trackers": []},
        evaluation={"prompts": "tiny:colors:test", "num_images": 4, "num_inference_steps": 2},
    )  # fmt: skip
    align(config, pipeline=load_tiny())
    text = (folder / CONFIG).read_text()
    path = config.pipeline.path
    if "path: the pipeline" in text or path not in text:
        text = text.replace("the pipeline that was given", path)
        (folder / CONFIG).write_text(text)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def header_of(path):
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def rewrite(path, change, header=None):
    """Write a LoRA again with other tensors, or another header, and without a digest."""
    tensors = load_file(path)
    change(tensors)
    header = {k: v for k, v in (header or header_of(path)).items() if k != SEAL}
    save_file(tensors, path, metadata=header)


def nan_in_lora(run):
    def change(tensors):
        next(iter(tensors.values())).view(-1)[0] = torch.nan

    rewrite(run / FILE, change)


def wrong_alpha(run):
    header = header_of(run / FILE)
    inner = json.loads(header[METADATA])
    inner["transformer.lora_alpha"] *= 2
    rewrite(run / FILE, lambda tensors: None, header | {METADATA: json.dumps(inner)})


def no_alpha(run):
    rewrite(run / FILE, lambda tensors: None, {"format": "pt"})


def missing_layer(run):
    def change(tensors):
        layer = sorted(tensors)[0].partition(".lora_")[0]
        for name in [name for name in tensors if name.startswith(f"{layer}.lora_")]:
            del tensors[name]

    rewrite(run / FILE, change)


def half_a_layer(run):
    rewrite(run / FILE, lambda tensors: tensors.pop(sorted(tensors)[0]))


def extra_layer(run):
    def change(tensors):
        for side in "AB":
            name = next(n for n in sorted(tensors) if f"lora_{side}" in n)
            layer = name.partition(".lora_")[0]
            tensors[name.replace(layer, "transformer.nowhere.to_q")] = tensors[name].clone()

    rewrite(run / FILE, change)


def flipped_bit(run):
    """In the LoRA's last number, which no format forbids."""
    data = bytearray((run / FILE).read_bytes())
    data[-4] ^= 1
    (run / FILE).write_bytes(bytes(data))


def truncated_lora(run):
    data = (run / FILE).read_bytes()
    (run / FILE).write_bytes(data[: len(data) // 2])


def newest(run):
    checkpoints = Checkpoints(run, keep=1)
    return checkpoints.path(checkpoints.steps()[-1]) / STATE


def truncated_checkpoint(run):
    data = newest(run).read_bytes()
    newest(run).write_bytes(data[:-10])


def change_state(run, change):
    state = load_state(newest(run))
    change(state)
    save_state(newest(run), state)


def inf_in_checkpoint(run):
    change_state(run, lambda state: state["policy"]["adapters"][POLICY][0].fill_(torch.inf))


def flipped_bit_in_checkpoint(run):
    data = bytearray(newest(run).read_bytes())
    data[-100] ^= 16
    newest(run).write_bytes(bytes(data))


def checkpoint_of_another_iteration(run):
    change_state(run, lambda state: state.update(iteration=1))


def truncated_evaluation(run):
    path = sorted(run.glob("evaluations/*"))[0]
    path.write_bytes(path.read_bytes()[:100])


def another_lora(run):
    shutil.copy(sorted(run.glob(f"checkpoints/*/{FILE}"))[0], run / FILE)


def changed_recipe(run):
    path = run / CONFIG
    text = path.read_text()
    assert "noise_level: 0.7" in text
    path.write_text(text.replace("noise_level: 0.7", "noise_level: 0.9"))


def changed_adapter(run):
    """In every checkpoint, and the LoRA too: only the replay can tell."""
    for path in run.glob(f"checkpoints/*/{STATE}"):
        state = load_state(path)
        for tensor in state["policy"]["adapters"][POLICY]:
            tensor.mul_(1.5)
        save_state(path, state)
    rewrite(run / FILE, lambda tensors: [t.mul_(1.5) for t in tensors.values()])


RUN_FAULTS = (
    nan_in_lora, wrong_alpha, no_alpha, missing_layer, half_a_layer, extra_layer, flipped_bit,
    truncated_lora, truncated_checkpoint, inf_in_checkpoint, flipped_bit_in_checkpoint,
    checkpoint_of_another_iteration, truncated_evaluation, another_lora, changed_recipe,
    changed_adapter,
)  # fmt: skip


@pytest.mark.parametrize("fault", some(RUN_FAULTS, ()))
def test_a_runs_fault_is_found(fault, run, load_tiny):
    fault(run)
    assert topics(verify_run(run, pipeline=load_tiny()))


@pytest.mark.slow
def test_a_good_run_passes_and_its_iteration_repeats_bit_for_bit(run, load_tiny):
    results = list(verify_run(run, pipeline=load_tiny()))
    assert topics(results) == {}
    (replay,) = [result for result in results if result.topic == "replay"]
    assert replay.state == "ok" and "iteration 3 again" in replay.detail
    assert topics(check_lora(run)) == {}


@pytest.fixture(scope="module")
def good_store(tiny_config, load_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "store"
    collect(tiny_config(), folder, groups=2, pipeline=load_tiny())
    return folder


def nan_latent(store):
    path = latents_file(store, 0)
    tensors = load_file(path)
    tensors["x0"][1, 0] = torch.nan
    save_file(tensors, path)


def wrong_row(store):
    path = rows_file(store, 0)
    path.write_text(path.read_text().replace('"row": 1', '"row": 100'))


def truncated_latents(store):
    path = latents_file(store, 0)
    path.write_bytes(path.read_bytes()[:-100])


def flipped_bit_in_latents(store):
    data = bytearray(latents_file(store, 0).read_bytes())
    data[-7] ^= 1
    latents_file(store, 0).write_bytes(bytes(data))


def changed_score(store):
    path = rows_file(store, 0)
    path.write_text(path.read_text().replace('"reward/brightness": 0.', '"reward/brightness": 1.'))


def blank_latent(store):
    path = latents_file(store, 0)
    tensors = load_file(path)
    tensors["x0"][2] = 0
    save_file(tensors, path)


STORE_FAULTS = (
    nan_latent, wrong_row, truncated_latents, flipped_bit_in_latents, changed_score, blank_latent,
)  # fmt: skip


@pytest.mark.slow
def test_a_stores_faults_are_found_and_a_good_one_passes(good_store, tmp_path):
    assert topics(check_store(good_store)) == {}
    for fault in STORE_FAULTS:
        store = Path(shutil.copytree(good_store, tmp_path / fault.__name__))
        fault(store)
        assert topics(check_store(store)), fault


# --- the command --------------------------------------------------------------------------------


def test_the_command_says_what_is_wrong_and_exits_with_1(tmp_path, load_tiny, capsys):
    from peft import LoraConfig

    pipeline = load_tiny()
    pipeline.transformer.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["attn.to_q"]))
    save_lora(pipeline, tmp_path, adapter=POLICY)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path / FILE)])
    assert not caught.value.code and "rank 2, strength 2" in capsys.readouterr().out
    nan_in_lora(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path)])
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and "1 checks failed, of lora" in err
    assert "!!  lora" in out and "not finite" in out
    for words, told in ((["verify"], "Nothing to verify"), (["verify", "--self", "x"], "leave 'x'"),
                        (["verify", str(tmp_path.parent)], "is neither a run")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words)
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_with_parts_of_ones_own_is_checked(tiny_config, load_tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(planted.__file__).parent))
    config = tiny_config(
        rewards=[{"name": "planted:redness"}],
        objective={"kind": "custom", "target": "planted:GroupsMixed"},
        rollout={"tree": {"kind": "ode"}, "num_inference_steps": 3, "prompts_per_iteration": 2,
                 "group_size": 4},
    )  # fmt: skip
    found = topics(verify_recipe(config, pipeline=load_tiny()))
    assert set(found) == {"groups"}
    assert "planted" in sys.modules


@pytest.mark.slow
def test_the_identities_of_this_version_hold_here():
    from flowrl.verify.identities import verify_self

    results = list(verify_self())
    assert topics(results) == {} and {r.topic for r in results} >= {
        "sampler", "steps", "formats", "files", "ratio", "gradient",
    }  # fmt: skip
