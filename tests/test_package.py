"""What is shipped, and what importing it costs."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flowrl

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "PIL", "cv2")


def python(*words, cwd=None, path=ROOT):
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


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
    "explain": "from flowrl.config.explain import explain; explain('optim.lr')",
}


def test_what_needs_no_tensors_loads_no_torch():
    after = f"import sys; print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    for code in LIGHT.values():
        result = python("-c", f"{code}\n{after}")
        assert result.returncode == 0, result.stderr
        assert result.stderr.splitlines()[-1] == "[]"


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


def built(kind, folder):
    """Build the package as a wheel or an sdist into a folder; return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    [file] = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_both_packages_the_recipes_and_nothing_else(wheel, tmp_path):
    unpacked = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for package, name in (("flowrl",) * 2, ("rewards", "flowrl_rewards"), ("flowrl_rewards",) * 2):
        ours = {p.relative_to(ROOT / package) for p in (ROOT / package).rglob("*") if p.is_file()}
        ours = {p for p in ours if "__pycache__" not in p.parts and p.suffix != ".pyc"}
        assert ours and not [str(p) for p in sorted(ours) if not (unpacked / name / p).is_file()]
    recipes = {p.name for p in (ROOT / "configs").glob("*.yaml")}
    assert {p.name for p in (unpacked / "flowrl" / "configs").glob("*.yaml")} == recipes
    # The wheel holds the tiny pipeline in at most 8 mb.
    folder = unpacked / "flowrl" / "assets" / "tiny-sd3"
    assert (folder / "model_index.json").is_file()
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= 8_000_000
    # The wheel puts nothing else beside them.
    info = f"flowrl_diffusion-{flowrl.__version__}.dist-info"
    assert {p.name for p in unpacked.iterdir()} == {"flowrl", "flowrl_rewards", info}
    # The wheel says what it is.
    info = next(unpacked.glob("*.dist-info"))
    metadata = (info / "METADATA").read_text()
    assert "Name: flowrl-diffusion" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "flowrl = flowrl.cli:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()


# --- a training run elsewhere than here ----------------------------------------------------------

SMALL = "train quickstart evaluation.num_images=6 run.trackers=[] pipeline.device=cpu".split()


@pytest.mark.slow
def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_caches(tmp_path):
    name = f"flowrl_diffusion-{flowrl.__version__}"
    with tarfile.open(built("sdist", tmp_path)) as archive:
        files = {Path(m.name).relative_to(name): m.size for m in archive if m.isfile()}
    for file in ("README.md", "LICENSE", "pyproject.toml", "PKG-INFO"):
        assert Path(file) in files, file
    for folder in ("flowrl", "flowrl/assets", "flowrl_rewards", "rewards", "configs", "tests"):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file()}
        ours = {p for p in ours if "__pycache__" not in p.parts and p.suffix != ".pyc"}
        assert ours and not [str(p) for p in sorted(ours - set(files))]
    caches = ("__pycache__", ".pytest_cache", ".ruff_cache", ".git", ".ci", "runs", "dist")
    assert not [str(p) for p in files if p.suffix == ".pyc" or set(caches) & set(p.parts[:-1])]
    assert sum(files.values()) < 40e6


# --- a user's own module `rewards`, and flowrl's -------------------------------------------------

# As the flowrl command loads rewards, which starts without the working directory on its path.
PROGRAM = """
import site, sys
elsewhere = [place for place in sys.path if place]
site.addsitedir(sys.argv[1])
# Before whatever else is installed.
sys.path[:] = [place for place in sys.path if place and place not in elsewhere] + elsewhere
from flowrl.scoring.spec import load_reward
print(*(load_reward(name).__module__ for name in ("geneval", "rewards:mine")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["-e"]], ids=str)
def test_pip_installs_what_lives_with_the_rewards_of_a_user(tmp_path, words):
    """Both `rewards` are found, however flowrl is installed."""
    pip = ["pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    result = python("-m", *pip, "--target", str(tmp_path / "installed"), *words, str(ROOT))
    assert result.returncode == 0, result.stderr
    (tmp_path / "rewards.py").write_text("def mine(images, prompts, metadata): ...")
    result = python("-c", PROGRAM, str(tmp_path / "installed"), cwd=tmp_path, path="")
    assert result.stdout.split() == ["flowrl_rewards.geneval", "rewards"], result.stderr


@pytest.mark.slow
def test_the_installed_wheel_runs_the_quickstarts_first_iteration(wheel, tmp_path):
    pip = ["pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "here"), str(wheel)]
    assert python("-m", *pip).returncode == 0
    words = ["-m", "flowrl", *SMALL, "run.iterations=1"]
    result = python(*words, cwd=tmp_path, path=tmp_path / "here")
    assert result.returncode == 0, result.stderr
    assert "runs/quickstart/gallery/index.html" in result.stdout.replace(os.sep, "/")
