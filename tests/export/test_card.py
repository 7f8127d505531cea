"""The model card is read by the Hub, by people, and by Python."""

import ast
import re
from typing import Any

import pytest
import yaml
from PIL import Image

from flowrl.export.gallery import GalleryRow
from flowrl.export.hub import Licence, licence_of
from flowrl.export.model_card import Card, write_card
from flowrl.functional.contrasts import Contrast
from flowrl.training.evaluate import EvaluationComparison

HOSTILE = 'a: "cat" --- \n---\nlicense: mit\n``` <b>| [x](http://example.com) {{ 7*7 }} \'#'


CHANGE = Contrast(mean=0.14, low=0.1, high=0.18, p=0.01, images=9, prompts=9)


def pair(prompt: str) -> GalleryRow:
    images = tuple(Image.new("RGB", (64, 64), color) for color in ("white", "black"))
    return GalleryRow(prompt=prompt, images=images, scores={"ocr": (0, 1)})


def card(**changes: Any) -> Card:
    values: dict[str, Any] = {
        "base_model": "stabilityai/stable-diffusion-3.5-medium",
        "on_hub": True,
        "load_from": "'stabilityai/stable-diffusion-3.5-medium'",
        "call": {"num_inference_steps": 8, "guidance_scale": 1.0},
        "license": Licence(id="apache-2.0"),
        "method": "Flow-GRPO",
        "weights": "EMA",
        "step": 240,
        "command": "flowrl train quickstart",
        "config": "rollout:\n  steps: 8\n",
        "evaluation": "600 images of unseen prompts",
        "summary": [
            EvaluationComparison(name="ocr|x", before=0.48, after=0.62, change=CHANGE)
        ],
        "curves": {"reward/mean": [(1, 0.5), (2, 0.6)], "reward/ocr": []},
        "rows": [pair("a red circle"), pair(HOSTILE)],
    }
    return Card(**(values | changes))


def parts(folder, made: Card) -> tuple[dict[str, Any], str]:
    text = write_card(folder, made).read_text("utf-8")
    _, header, body = re.split(r"^---\n", text, maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(header), body


def code_blocks(body: str, language: str) -> list[str]:
    found = re.findall(rf"^(`{{3,}}){language}\n(.*?)^\1$", body, re.MULTILINE | re.DOTALL)
    return [text for _, text in found]


def test_the_front_matter_is_what_the_hub_reads(tmp_path):
    header, body = parts(tmp_path, card())
    tags = {"text-to-image", "diffusers", "lora", "template:sd-lora", "reinforcement-learning"}
    assert set(header["tags"]) == tags
    assert header["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
    assert header["license"] == "apache-2.0"
    assert [w["text"] for w in header["widget"]] == ["a red circle", HOSTILE]
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard.load(tmp_path / "README.md").data.widget
    # Every image that the card shows lies beside it, and is large enough for the Hub.
    shown = re.findall(r"\]\((.*?)\)|src(?:set)?=\"(.*?)\"", body)
    shown = ["".join(names) for names in shown] + [w["output"]["url"] for w in header["widget"]]
    assert len(shown) == 5
    for name in shown:
        with Image.open(tmp_path / name) as image:
            assert min(image.size) >= 256


def test_the_loading_code_names_the_folder_and_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path.parent / "elsewhere"
    for folder, named in ((tmp_path / "runs" / "it's", "runs/it's"), (elsewhere, str(elsewhere))):
        _, body = parts(folder, card(rows=[pair(HOSTILE)], curves={}))
        check_loading_code(body, named)


def check_loading_code(body: str, folder: str) -> None:
    (code,) = code_blocks(body, "python")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    load = next(c for c in calls if getattr(c.func, "attr", "") == "load_lora_weights")
    draw = next(c for c in calls if getattr(c.func, "id", "") == "pipe")
    assert ast.literal_eval(load.args[0]) == folder
    assert ast.literal_eval(draw.args[0]) == HOSTILE
    named = {k.arg: ast.literal_eval(k.value) for k in draw.keywords}
    assert named == {"num_inference_steps": 8, "guidance_scale": 1.0}


def test_scores_stand_in_a_table_that_a_reward_name_cannot_break(tmp_path):
    _, body = parts(tmp_path, card())
    (row,) = [line for line in body.splitlines() if line.startswith("| ocr")]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells == ["ocr\\|x", "0.480", "0.620", "+0.140", "+0.100 to +0.180"]


def test_what_is_missing_is_said_or_left_out_and_a_configuration_cannot_leave_its_block(tmp_path):
    config = "rollout:\n  negative: |\n````\n# not a heading\n"
    made = card(config=config, summary=[], curves={}, rows=[], weights="policy", step=17)
    header, body = parts(tmp_path, made)
    assert "widget" not in header and "![" not in body and "<Gallery" not in body
    assert "was not evaluated" in body and not (tmp_path / "card").exists()
    assert code_blocks(body, "yaml") == [config]
    assert re.search(r"\*\*policy\*\* weights after\s+\*\*17\*\* iterations", body)


FLUX = "black-forest-labs/FLUX.1-dev"
PLAIN: dict[str, Any] = {"rows": (), "curves": {}}  # images take time


def test_the_licence_is_that_of_the_base(tmp_path):
    for base, name in (
        (FLUX, "flux-1-dev-non-commercial-license"),
        ("stabilityai/stable-diffusion-3.5-medium", "stabilityai-ai-community"),
        ("stabilityai/stable-diffusion-3.5-large", "stabilityai-ai-community"),
        ("Efficient-Large-Model/Sana_1600M_1024px_diffusers", "nscl-v2-custom"),
    ):
        header, body = parts(tmp_path, card(base_model=base, license=licence_of(base), **PLAIN))
        assert (header["license"], header["license_name"]) == ("other", name)
        assert header["license_link"].startswith(f"https://huggingface.co/{base}/blob/main/LICENSE")
        assert f"]({header['license_link']}), as the base model." in body
    assert licence_of("me/mine") is None and licence_of("tiny-sd3") is None
    assert licence_of("black-forest-labs/FLUX.1-schnell") == Licence(id="apache-2.0")
    unknown = card(on_hub=False, base_model="tiny-sd3", license=None, **PLAIN)
    header, body = parts(tmp_path, unknown)
    assert not {"base_model", "base_model_relation", "license"} & set(header)
    assert "tiny-sd3" in body and "The base model's licence holds for this LoRA too." in body
