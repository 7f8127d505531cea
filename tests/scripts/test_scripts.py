"""The scripts: a family's training with its default recipe, gallery entries of finished runs."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from flowrl.cli import train as training
from flowrl.config import load_config
from flowrl.config.load import load_yaml, sort_arguments
from flowrl.errors import UserError

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAMILIES = ("sd3", "flux", "sana")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- training of a family -----------------------------------------------------------------------


def test_a_script_trains_the_recipes_of_its_family(capsys):
    # Without a recipe the familys own is trained with the changes.
    for family in FAMILIES:
        module = script(f"train_{family}")
        module.main(["--learning_rate", "2e-4", "--print-config"])
        printed = load_yaml(capsys.readouterr().out)
        assert printed == load_config(module.RECIPE, ["optim.lr=2e-4"]).model_dump(mode="json")
        assert printed["pipeline"]["backbone"] == family
    # The commands it shows name recipes of its family.
    for family in FAMILIES:
        text = (script(f"train_{family}").__doc__ or "").replace("\\\n", " ")
        commands = re.findall(rf"(?<=scripts/train_{family}\.py)( .*)", text)
        assert len(commands) == 3 and "--num_machines 2 --num_processes 16" in text
        for command in commands[1:]:
            assert (
                load_config(sort_arguments(shlex.split(command)).recipe).pipeline.backbone == family
            )
    # A recipe of another family is refused.
    with pytest.raises(UserError, match="is a recipe for sd3, .* trains flux: .*train_sd3.py"):
        script("train_flux").main(["quickstart"])
    with pytest.raises(UserError, match="is a recipe for mine:Own, .* take flowrl train"):
        script("train_sana").main(["quickstart", "pipeline.backbone=mine:Own"])


def test_a_run_to_go_on_with_brings_its_own_recipe(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(training, "train", lambda *words, **flags: calls.append((words, flags)))
    (tmp_path / "config.yaml").write_text("extends: quickstart")
    words = ["--resume_from_checkpoint", str(tmp_path)]
    script("train_sd3").main([*words, "--dry-run"])
    assert calls == [((words,), {"dry_run": True, "print_config": False})]
    with pytest.raises(UserError, match="is a recipe for sd3, but this script trains sana"):
        script("train_sana").main(words)
    script("train_flux").main(["--resume_from_checkpoint", "latest"])
    assert calls[-1][0][0][0] == script("train_flux").RECIPE


# --- gallery entries ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """What a finished run leaves, one of its images large."""
    folder = tmp_path / "runs" / "small"
    for name, side in (
        ("card/curve.png", 20),
        ("card/aligned-1.png", 500),
        ("gallery/grid.png", 9),
    ):
        pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    (folder / "README.md").write_text("![](card/curve.png) url: card/aligned-1.png")
    (folder / "config.yaml").write_text("run: {}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "gallery" / "index.html").write_text("<html>")
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    return folder


def test_entries_hold_what_can_be_looked_at(run, tmp_path):
    (entry,) = script("make_gallery").main([str(run), "--output", str(tmp_path / "gallery")])
    assert entry == tmp_path / "gallery" / "small"
    files = {p.relative_to(entry).as_posix() for p in entry.rglob("*") if p.is_file()}
    assert files == {
        "README.md", "config.yaml", "metrics.jsonl", "card/curve.png", "card/aligned-1.webp",
        "gallery/grid.png", "gallery/index.html",
    }  # fmt: skip
    assert (entry / "README.md").read_text() == "![](card/curve.png) url: card/aligned-1.webp"
    assert (entry / "card/curve.png").read_bytes() == (run / "card/curve.png").read_bytes()
    assert Image.open(entry / "card/aligned-1.webp").size == (500, 500)
    # An entry is replaced and a large page left out.
    main, words = script("make_gallery").main, [str(run), "--output", str(tmp_path / "gallery")]
    main(words)
    (run / "card" / "aligned-1.png").unlink()
    (run / "gallery" / "index.html").write_bytes(b" " * 2_000_001)
    (entry,) = main(words)
    assert [p.name for p in (entry / "card").iterdir()] == ["curve.png"]
    assert [p.name for p in (entry / "gallery").iterdir()] == ["grid.png"]


def test_entries_that_cannot_be_made_are_refused(run, tmp_path):
    # A run that is not finished is refused before anything is written.
    other = run.parent / "unfinished"
    other.mkdir()
    words = [str(run), str(other), "--output", str(tmp_path / "gallery")]
    with pytest.raises(UserError, match="unfinished has no README.md, config.yaml"):
        script("make_gallery").main(words)
    assert not (tmp_path / "gallery").exists()
    # Every entry needs a name of its own.
    with pytest.raises(UserError, match="a name of its own for each"):
        script("make_gallery").main([str(run), str(run)])
