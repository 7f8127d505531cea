"""What is shipped, and what importing it costs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flowrl

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "PIL", "cv2")


def python(*words, cwd=None, path=ROOT):
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def loaded(code):
    """Which heavy packages are loaded after the code has run."""
    after = f"import sys; print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    result = python("-c", f"{code}\n{after}")
    assert result.returncode == 0, result.stderr
    return result.stderr.splitlines()[-1]


HELP = """
from flowrl.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
"""
LIGHT = {
    "import": "import flowrl; flowrl.__version__",
    "help": HELP,
    "train help": HELP.replace("--help", "train', '--help").replace('"', "'"),
    "config": "import flowrl; flowrl.load_config('quickstart')",
    "explain": "from flowrl.config.messages import explain; explain('optim.lr')",
}


def test_what_needs_no_tensors_loads_no_torch():
    for code in LIGHT.values():
        assert loaded(code) == "[]"


def test_it_answers_in_well_under_a_second():
    """Processor time, the best of three: a busy machine makes wall time say nothing."""
    for words in [("-c", "import flowrl"), ("-m", "flowrl", "--help")]:
        assert min(processor_seconds(*words) for _ in range(3)) < 0.7


def processor_seconds(*words):
    before = os.times()
    assert python(*words).returncode == 0
    after = os.times()
    spent = after.children_user - before.children_user
    return spent + after.children_system - before.children_system


def test_public_names_are_there_and_no_others():
    for name in flowrl.__all__:
        assert getattr(flowrl, name) is not None
    assert set(flowrl.__all__) <= set(dir(flowrl))
    # A name that is not there is an attribute error.
    with pytest.raises(AttributeError, match="has no attribute 'trainn'"):
        flowrl.trainn  # noqa: B018


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_both_packages_the_recipes_and_nothing_else(unpacked):
    for package in ("flowrl", "rewards"):
        ours = {p.relative_to(ROOT) for p in (ROOT / package).rglob("*") if p.is_file()}
        ours = {p for p in ours if "__pycache__" not in p.parts and p.suffix != ".pyc"}
        assert ours and not [str(p) for p in sorted(ours) if not (unpacked / p).is_file()]
    recipes = {p.name for p in (ROOT / "configs").glob("*.yaml")}
    assert {p.name for p in (unpacked / "flowrl" / "configs").glob("*.yaml")} == recipes
    # The wheel holds the tiny pipeline in at most 8 mb.
    folder = unpacked / "flowrl" / "assets" / "tiny-sd3"
    assert (folder / "model_index.json").is_file()
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= 8_000_000
    # The wheel puts nothing else beside them.
    info = f"flowrl_diffusion-{flowrl.__version__}.dist-info"
    assert {p.name for p in unpacked.iterdir()} == {"flowrl", "rewards", info}
    # The wheel says what it is.
    info = next(unpacked.glob("*.dist-info"))
    metadata = (info / "METADATA").read_text()
    assert "Name: flowrl-diffusion" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "flowrl = flowrl.cli:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()


def test_presets_are_found_in_the_installed_package(unpacked, tmp_path):
    words = ("-m", "flowrl", "train", "quickstart", "--print-config")
    result = python(*words, cwd=tmp_path, path=unpacked)
    assert result.returncode == 0, result.stderr
    assert "tiny-sd3" in result.stdout


@pytest.fixture
def shadowed(tmp_path):
    """A working directory with a `rewards` folder of its own."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").touch()
    return tmp_path


LOAD = "from flowrl.scoring.spec import load_reward; print(load_reward('geneval', {}))"


def test_a_folder_that_hides_our_rewards_is_named(unpacked, shadowed):
    result = python("-c", LOAD, cwd=shadowed, path=unpacked)
    assert "UserError" in result.stderr
    assert str(shadowed / "rewards") in result.stderr
    # A program elsewhere finds our rewards from that folder.
    script = shadowed / "elsewhere" / "program.py"
    script.parent.mkdir()
    script.write_text(LOAD)
    result = python(str(script), cwd=shadowed, path=unpacked)
    assert result.returncode == 0, result.stderr
