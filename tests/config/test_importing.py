"""Recipes of flow_grpo and Flow-Factory, written after those projects' documentation."""

from pathlib import Path

import pytest
import yaml

from flowrl.cli import main
from flowrl.config import load_config
from flowrl.config.importing import import_recipe, recipe_text
from flowrl.errors import UserError

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 42
    config.mixed_precision = "fp16"
    config.allow_tf32 = True
    config.resolution = 768
    config.pretrained = pretrained = ml_collections.ConfigDict()
    pretrained.model = "runwayml/stable-diffusion-v1-5"
    pretrained.revision = "main"
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 40
    sample.eval_num_steps = 40
    sample.guidance_scale = 4.5
    sample.noise_level = 0.7
    config.train = train = ml_collections.ConfigDict()
    train.learning_rate = 3e-4
    train.clip_range = 1e-4
    train.beta = 0.0
    train.kind_of_optimizer = "adam"
    train.ema = False
    return config
"""
GRPO = """
import imp, os
base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))
raise SystemExit("this file was run")

def compressibility():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.dataset = os.path.join(os.getcwd(), "dataset/pickscore")
    config.reward_fn = {"jpeg_compressibility": 1}
    config.save_freq = 60
    return config

def ocr():
    gpu_number = 32
    config = compressibility()
    config.dataset = os.path.join(os.getcwd(), "dataset/ocr")
    config.sample.num_steps = 10
    config.resolution = 512
    config.sample.train_batch_size = 9
    config.sample.num_image_per_prompt = 24
    config.sample.num_batches_per_epoch = int(
        48/(gpu_number*config.sample.train_batch_size/config.sample.num_image_per_prompt))
    assert config.sample.num_batches_per_epoch % 2 == 0, "even"
    config.train.batch_size = config.sample.train_batch_size
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.timestep_fraction = 0.99
    config.train.beta = 0.04
    config.train.ema = True
    config.save_dir = f'logs/{"ocr"}/sd3.5-M'
    config.secret = open("/etc/passwd").read()
    config.reward_fn = {"ocr": 1.0, "deqa": 0.5}
    return config
"""
FLOW_FACTORY = """
mixed_precision: "bf16"
data: {dataset_dir: "dataset/pickscore", max_dataset_size: 1024}
model:
  finetune_type: lora
  lora_rank: 32
  lora_alpha: 64
  target_modules: default
  model_name_or_path: stabilityai/stable-diffusion-3.5-medium
  model_type: sd3-5
log: {logging_backend: wandb, save_dir: saves/, save_freq: 20}
train:
  trainer_type: grpo
  advantage_aggregation: sum
  clip_range: 1.0e-4
  adv_clip_range: 5.0
  kl_type: v-based
  kl_beta: 0.001
  resolution: 512
  num_inference_steps: 10
  guidance_scale: 4.5
  per_device_batch_size: 8
  group_size: 24
  global_std: true
  unique_sample_num_per_epoch: 48
  gradient_step_per_epoch: 2
  learning_rate: 3.0e-4
  adam_betas: [0.9, 0.999]
  ema_decay: 0.99
  magic: 7
scheduler: {dynamics_type: Flow-SDE, noise_level: 0.8, num_sde_steps: 2, sde_steps: [1, 2, 3]}
eval: {guidance_scale: 4.5, num_inference_steps: 40, eval_freq: 20}
rewards:
  - {name: pick_score, reward_model: PickScore, batch_size: 16}
  - {name: mine, server_url: "http://127.0.0.1:8000"}
"""


@pytest.fixture
def flow_grpo(tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "grpo.py").write_text(GRPO)
    return tmp_path / "grpo.py"


@pytest.fixture
def flow_factory(tmp_path):
    (tmp_path / "default.yaml").write_text(FLOW_FACTORY)
    return tmp_path / "default.yaml"


def test_a_flow_grpo_config_is_read_without_running_it(flow_grpo):
    found = import_recipe(f"{flow_grpo}:ocr")
    recipe = found.recipe
    assert recipe["pipeline"]["path"] == "stabilityai/stable-diffusion-3.5-medium"
    assert recipe["pipeline"]["height"] == 512 and recipe["pipeline"]["max_sequence_length"] == 128
    assert recipe["prompts"]["train"] == recipe["evaluation"]["prompts"] == "dataset/ocr"
    rollout = recipe["rollout"]
    assert (rollout["prompts_per_iteration"], rollout["group_size"]) == (48, 24)
    assert rollout["num_inference_steps"] == 10 and rollout["noise_level"] == 0.7
    assert recipe["optim"]["updates_per_rollout"] == 2 and recipe["optim"]["micro_batch"] == 9
    assert recipe["objective"]["kl_coef"] == 0.04 and recipe["objective"]["clip_eps"] == 1e-4
    assert recipe["ema"] == {"decay": 0.9} and recipe["run"]["output_dir"] == "logs/ocr/sd3.5-M"
    assert [reward["name"] for reward in recipe["rewards"]] == ["ocr"]
    said = "\n".join(found.left_out)
    assert "reward deqa (weight 0.5): no counterpart" in said
    assert "train.kind_of_optimizer = 'adam': no counterpart" in said
    assert "secret = <open('/etc/passwd').read()>: no counterpart" in said


def test_a_flow_factory_recipe_is_read_with_its_window_and_server(flow_factory):
    found = import_recipe(str(flow_factory))
    rollout, objective = found.recipe["rollout"], found.recipe["objective"]
    window = {"kind": "random", "size": 2, "start": 1, "stop": 4}
    assert rollout["tree"] == {"kind": "flow_grpo_fast", "window": window}
    assert rollout["kernel"] == "flow_sde" and rollout["noise_level"] == 0.8
    assert (rollout["prompts_per_iteration"], rollout["group_size"]) == (48, 24)
    assert objective["kl_form"] == "velocity" and objective["credit"]["scale"] == "global"
    mine, pick = found.recipe["rewards"]
    assert mine["executor"]["kind"] == "http" and pick["name"] == "pickscore"
    assert "train.magic = 7: no counterpart" in found.left_out


def test_both_are_recipes_that_flowrl_takes(flow_grpo, flow_factory, tmp_path):
    for number, source in enumerate([f"{flow_grpo}:ocr", str(flow_factory)]):
        target = tmp_path / f"recipe{number}.yaml"
        with pytest.raises(SystemExit) as end:
            main(["import", source, "-o", str(target)])
        assert not end.value.code
        text = target.read_text()
        assert text.startswith(f"# Imported from {source}") and "no counterpart" in text
        config = load_config(target)
        assert config.rollout.group_size == 24 and config.lora.alpha == 64
        assert yaml.safe_load(text) == import_recipe(source).recipe


@pytest.mark.slow
def test_both_can_be_planned_and_rehearsed(flow_grpo, flow_factory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("ocr", 'A sign that says "{}"'), ("pickscore", "{} stars")):
        (tmp_path / "dataset" / name).mkdir(parents=True)
        for split, first in (("train", 10), ("test", 20)):
            lines = "".join(text.format(number) + "\n" for number in range(first, first + 8))
            (tmp_path / "dataset" / name / f"{split}.txt").write_text(lines)
    for number, source in enumerate([f"{flow_grpo}:ocr", str(flow_factory)]):
        for words in (["import", source, "-o", f"{number}.yaml"], ["plan", f"{number}.yaml"]):
            with pytest.raises(SystemExit) as end:
                main(words)
            assert not end.value.code
        with pytest.raises(SystemExit) as end:
            main(["train", f"{number}.yaml", "--dry-run"])
        assert not end.value.code and "The loop works" in capsys.readouterr().out


def test_every_config_of_the_published_file_reads_or_says_what_is_missing(flow_grpo):
    with pytest.raises(
        UserError, match=r"has no config 'x': name one as .*grpo.py:NAME, of compre"
    ):
        import_recipe(f"{flow_grpo}:x")
    assert import_recipe(f"{flow_grpo}:compressibility").recipe["rewards"] == [
        {"name": "compressibility"}
    ]
    said = "\n".join(import_recipe(f"{flow_grpo}:compressibility").left_out)
    assert "number of GPUs: not in the file" in said


def test_what_is_no_recipe_of_theirs_is_refused(tmp_path, flow_grpo, flow_factory):
    def refused(name: str, text: str, match: str) -> None:
        path: Path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UserError, match=match):
            import_recipe(str(path) if name.endswith("yaml") else f"{path}:f")

    refused("a.yaml", "lora: {rank: 4}", "no recipe of Flow-Factory")
    other = FLOW_FACTORY.replace("stable-diffusion-3.5-medium", "wan2.1").replace("sd3-5", "wan")
    refused("b.yaml", other, "has SD3, FLUX.1 and SANA")
    other = FLOW_FACTORY.replace("stable-diffusion-3.5-medium", "FLUX.1-Kontext-dev")
    refused("k.yaml", other.replace("sd3-5", "flux1-kontext"), "has SD3, FLUX.1 and SANA")
    other = FLOW_FACTORY.replace("trainer_type: grpo", "trainer_type: dpo")
    refused("c.yaml", other, "grpo, nft and awm")
    other = FLOW_FACTORY.replace("PickScore", "imagebind").replace("mine, server_url", "clap, url")
    refused("d.yaml", other, "none of the rewards imagebind, clap")
    refused("e.py", "def f(:", "is not a Python file")
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: \xe9}")
    with pytest.raises(UserError, match="latin.yaml: it is not UTF-8 text"):
        import_recipe(str(tmp_path / "latin.yaml"))
    with pytest.raises(UserError, match="there is no recipe"):
        import_recipe("nowhere.yaml")


def test_every_statement_that_is_not_understood_is_listed(flow_grpo):
    flow_grpo.write_text(
        GRPO
        + """
def free():
    "What it does."
    config = compressibility()
    s = config.sample
    s.num_steps = 77
    config.sample.guidance_scale: float = 2.0
    if True:
        config.resolution = 1024
    config.sample.num_steps += 1
    config.update({"seed": 3})
    config.reward_fn["pickscore"] = 0.5
    config.a, config.b = 1, 2
    with config.unlocked():
        config.c = 3
    other.d = 4
    return config
"""
    )
    found = import_recipe(f"{flow_grpo}:free")
    assert found.recipe["rollout"]["num_inference_steps"] == 77
    assert found.recipe["rollout"]["guidance_scale"] == 2.0
    noted = [
        line for line in found.left_out if line.endswith("not understood, set it in the recipe")
    ]
    assert [line.partition(":")[0] for line in noted] == ["free"] * 6 + ["other.d = 4"]
    told = ["if True", "+= 1", "config.update", "'pickscore'", "config.a, config.b", "unlocked"]
    assert all(part in line for part, line in zip(told, noted, strict=False))


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("config.train.learning_rate = compute()", "train.learning_rate = compute()"),
        ("config.sample.train_batch_size = size()", "sample.train_batch_size = size()"),
        ("config.reward_fn = make()", r"reward_fn = make\(\)"),
        ("config.train.gradient_accumulation_steps = 0", "train.gradient_accumulation_steps = 0"),
        ("config.train.algorithm = 'dpo'", "train.algorithm is dpo, and grpo is what can be"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_by_its_key(flow_grpo, line, key):
    flow_grpo.write_text(GRPO.replace("    config.save_freq = 60", f"    {line}"))
    with pytest.raises(UserError, match=key.replace("()", r"\(\)")):
        import_recipe(f"{flow_grpo}:compressibility")


@pytest.mark.parametrize(
    ("theirs", "broken", "key"),
    [
        ("kl_beta: 0.001", "kl_beta: none", "train.kl_beta = 'none' is not of a kind"),
        ("  resolution: 512", '  resolution: "512x512"', "train.resolution = '512x512' is not"),
        ("sde_steps: [1, 2, 3]", "sde_steps: 3", "scheduler.sde_steps = 3 is not"),
        ("learning_rate: 3.0e-4", "learning_rate: [1]", "train.learning_rate = "),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(flow_factory, theirs, broken, key):
    assert theirs in FLOW_FACTORY
    flow_factory.write_text(FLOW_FACTORY.replace(theirs, broken))
    with pytest.raises(UserError, match=key):
        import_recipe(str(flow_factory))


def test_weights_and_arguments_of_flow_factorys_rewards_are_kept_or_listed(flow_factory):
    head, _, _ = FLOW_FACTORY.partition("rewards:")
    rewards = """
rewards:
  - {name: a, reward_model: PickScore, weight: 2.0, model_path: mine/pick}
  - {name: b, reward_model: PickScore, weight: 0.5}
  - {name: c, server_url: "http://127.0.0.1:8000", weight: 3}
  - {server_url: "http://127.0.0.1:8001", weight: null}
"""
    text = head.replace("eval: {", "eval: {resolution: [768], ") + rewards
    flow_factory.write_text(text.replace("  resolution: 512", "  resolution: [512]"))
    found = import_recipe(str(flow_factory))
    assert [(r.get("label", r["name"]), r.get("weight", 1)) for r in found.recipe["rewards"]] == [
        ("c", 3.0), ("reward_4", 1), ("pickscore", 2.0), ("pickscore_2", 0.5),
    ]  # fmt: skip
    assert "rewards: a: model_path = 'mine/pick': no counterpart" in found.left_out
    assert found.recipe["pipeline"]["height"] == found.recipe["pipeline"]["width"] == 512
    assert found.recipe["evaluation"]["height"] == 768
    assert not any(line.startswith("eval.resolution") for line in found.left_out)


def test_flow_factorys_flux_reads_as_many_text_tokens_as_diffusers(flow_factory):
    other = FLOW_FACTORY.replace("stabilityai/stable-diffusion-3.5-medium", "me/FLUX.1-dev")
    flow_factory.write_text(other.replace("sd3-5", "flux1"))
    pipeline = import_recipe(str(flow_factory)).recipe["pipeline"]
    assert (pipeline["backbone"], pipeline["max_sequence_length"]) == ("flux", 512)


def test_a_recipe_that_flowrl_does_not_take_is_refused_with_the_list(flow_factory):
    flow_factory.write_text(FLOW_FACTORY.replace("group_size: 24", "group_size: -1"))
    with pytest.raises(UserError, match="(?s)group_size.*Without counterpart.*train.magic = 7"):
        recipe_text(import_recipe(str(flow_factory)))
