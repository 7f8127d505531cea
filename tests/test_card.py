"""The model card is read by the Hub, by people, and by Python."""

import ast
import re
from typing import Any

import pytest
import yaml
from PIL import Image

from flowrl.card import Card, write_card
from flowrl.gallery import GalleryPair, SummaryRow

HOSTILE = 'a: "cat" --- \n---\nlicense: mit\n``` <b>| [x](http://example.com) {{ 7*7 }} \'#'


def pair(prompt: str) -> GalleryPair:
    base, aligned = (Image.new("RGB", (64, 64), color) for color in ("white", "black"))
    return GalleryPair(prompt=prompt, draw=0, base=base, aligned=aligned, scores={"ocr": (0, 1)})


def card(**changes: Any) -> Card:
    values: dict[str, Any] = {
        "base_model": "stabilityai/stable-diffusion-3.5-medium",
        "on_hub": True,
        "load_from": "'stabilityai/stable-diffusion-3.5-medium'",
        "call": {"num_inference_steps": 8, "guidance_scale": 1.0},
        "license": "apache-2.0",
        "method": "Flow-GRPO",
        "weights": "EMA",
        "step": 240,
        "command": "flowrl train quickstart",
        "config": "rollout:\n  steps: 8\n",
        "evaluation": "600 pictures of unseen prompts",
        "summary": [
            SummaryRow(name="ocr|x", base=0.48, aligned=0.62, change=0.14, low=0.1, high=0.18)
        ],
        "curves": {"reward/mean": [(1, 0.5), (2, 0.6)], "reward/ocr": []},
        "pairs": [pair("a red circle"), pair(HOSTILE)],
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
    header, _ = parts(tmp_path, card())
    tags = {"text-to-image", "diffusers", "lora", "template:sd-lora", "reinforcement-learning"}
    assert set(header["tags"]) == tags
    assert header["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
    assert header["license"] == "apache-2.0"
    assert [w["text"] for w in header["widget"]] == ["a red circle", HOSTILE]


def test_the_hub_library_accepts_the_card(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    loaded = hub.ModelCard.load(write_card(tmp_path, card()))
    assert loaded.data.base_model == "stabilityai/stable-diffusion-3.5-medium"
    assert loaded.text.count("reward") and loaded.data.widget


def test_a_base_that_is_not_on_the_hub_is_not_linked_there(tmp_path):
    header, body = parts(tmp_path, card(on_hub=False, base_model="tiny-sd3", license=None))
    assert not {"base_model", "base_model_relation", "license"} & set(header)
    assert "tiny-sd3" in body


@pytest.mark.parametrize("inside", [True, False])
def test_the_loading_code_names_the_folder_and_the_settings(tmp_path, monkeypatch, inside):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "it's" if inside else tmp_path.parent / "elsewhere"
    _, body = parts(folder, card(pairs=[pair(HOSTILE)]))
    (code,) = code_blocks(body, "python")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    load = next(c for c in calls if getattr(c.func, "attr", "") == "load_lora_weights")
    draw = next(c for c in calls if getattr(c.func, "id", "") == "pipe")
    expected = "runs/it's" if inside else folder.as_posix()
    assert ast.literal_eval(load.args[0]) == expected
    assert ast.literal_eval(draw.args[0]) == HOSTILE
    named = {k.arg: ast.literal_eval(k.value) for k in draw.keywords}
    assert named == {"num_inference_steps": 8, "guidance_scale": 1.0}


def test_every_picture_that_the_card_shows_lies_beside_it(tmp_path):
    header, body = parts(tmp_path, card())
    shown = re.findall(r"\]\((.*?)\)", body) + [w["output"]["url"] for w in header["widget"]]
    assert len(shown) == 4
    for name in shown:
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) >= 256


def test_scores_stand_in_a_table_that_a_reward_name_cannot_break(tmp_path):
    _, body = parts(tmp_path, card())
    (row,) = [line for line in body.splitlines() if line.startswith("| ocr")]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells == ["ocr\\|x", "0.480", "0.620", "+0.140", "+0.100 to +0.180"]


def test_a_configuration_cannot_leave_its_block(tmp_path):
    config = "rollout:\n  negative: |\n````\n# not a heading\n"
    _, body = parts(tmp_path, card(config=config))
    assert code_blocks(body, "yaml") == [config]


def test_what_is_missing_is_said_or_left_out(tmp_path):
    header, body = parts(tmp_path, card(summary=[], curves={}, pairs=[]))
    assert "widget" not in header and "![" not in body and "<Gallery" not in body
    assert "was not evaluated" in body
    assert not (tmp_path / "card").exists()


def test_the_card_says_which_weights_it_holds_and_from_when(tmp_path):
    _, body = parts(tmp_path, card(weights="policy", step=17))
    assert re.search(r"\*\*policy\*\* weights after\s+\*\*17\*\* iterations", body)


def test_the_card_says_how_it_was_trained_where_there_is_more_to_say(tmp_path):
    _, body = parts(tmp_path, card(training="Candidates: 6 steps."))
    assert "## Training\n\nCandidates\\: 6 steps.\n\n```" in body
    assert "## Training\n\n```" in parts(tmp_path, card())[1]


def test_the_card_says_why_a_run_ended_early_and_what_its_rows_are(tmp_path):
    _, plain = parts(tmp_path, card())
    _, body = parts(tmp_path, card(stopped="Stopped at 7: x_y.", legend="corrected/R is R."))
    assert "iterations. Stopped at 7\\: x\\_y.\n\n## Use" in body
    assert "bootstrap over them.\ncorrected/R is R.\n" in body
    assert "iterations.\n\n## Use" in plain and "bootstrap over them.\n\n" in plain
