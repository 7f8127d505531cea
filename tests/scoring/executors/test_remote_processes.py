"""A run's side against `flowrl reward-serve` as the process it is, alive and killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import torch
from faulty import PATIENCE, random_images
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward

SLOW = '''
import time
from pathlib import Path

class Slow:
    """The mean, after a while; leaves a file where it was asked."""
    version = "slow-1"

    def __init__(self, seconds=0.25, mark="asked"):
        self.seconds, self.mark = seconds, Path(mark)

    def __call__(self, images, prompts, metadata):
        self.mark.touch()
        time.sleep(self.seconds)
        return images.mean((1, 2, 3))
'''
# The environment of an old model has no room for packages that the page does not name.
FEW = """
import sys
ABSENT = set({absent!r})

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reward-servers.md").read_text(encoding="utf-8")


def absent() -> list[str]:
    """Modules of whatever is installed beside the packages of the page and what these need."""
    (names,) = re.findall(r"^pip install (fastapi .*)$", PAGE, re.MULTILINE)
    known, ahead = {"flowrl-diffusion"}, {canonicalize_name(name) for name in names.split()}
    while ahead:
        known.add(name := ahead.pop())
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        used = [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
        ahead |= {canonicalize_name(n.name) for n in used} - known
    return [
        module
        for module, owners in packages_distributions().items()
        if not known & {canonicalize_name(owner) for owner in owners}
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "slow_reward.py").write_text(SLOW)
    (folder / "few").mkdir()
    (folder / "few" / "sitecustomize.py").write_text(FEW.format(absent=absent()))
    return folder


def begin(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "flowrl", "reward-serve", *words, "--port", "0"]
    places = os.pathsep.join([str(folder / "few"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": places, "REWARD_TOKEN": "secret"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def ready(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.stdout.read()
    return line.split()[-1]


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=10)


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[dict[str, tuple[subprocess.Popen, str]]]:
    """All at once: each takes seconds to start."""
    started = {
        "jpeg": begin(folder, "compressibility", "--token-env", "REWARD_TOKEN"),
        "doomed": begin(folder, "slow_reward:Slow", "--args", "{seconds: 0.2, mark: doomed}"),
        "steady": begin(folder, "slow_reward:Slow", "--args", "{seconds: 0, mark: steady}"),
    }
    try:
        yield {name: (process, ready(process)) for name, process in started.items()}
    finally:
        for process in started.values():
            end(process)


@pytest.mark.slow
def test_a_reward_served_with_few_packages_scores_as_it_does_in_process(servers):
    process, url = servers["jpeg"]
    images = torch.rand(21, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    asked = images.mul(255).round() / 255, ["p"] * 21, [{}] * 21
    reward = load_reward("compressibility")
    remote = HTTPExecutor("compressibility", [url], token="secret")
    answer = remote.submit(*asked).result()
    assert torch.equal(answer.scores, InlineExecutor(reward, "x").submit(*asked).result().scores)
    assert remote.version == reward.version and remote.bounds == reward.bounds
    remote.close()
    assert url.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=10)
    assert "Traceback" not in said


def test_a_server_killed_in_mid_batch_leaves_the_rest_to_the_other_and_then_nothing(
    servers, folder
):
    (doomed, first), (_, second) = servers["doomed"], servers["steady"]
    name, count = "slow_reward:Slow", 24
    options = {"timeout": 2.0, "deadline": 8.0, "micro_batch": 1}
    alone = HTTPExecutor(name, [first], timeout=0.3, deadline=1.0)
    assert alone.version == "slow-1"
    remote = HTTPExecutor(name, [first, second], **options)
    killer = threading.Thread(target=kill_when_asked, args=(doomed, folder / "doomed"))
    killer.start()
    scores, reasons = remote(random_images(count), ["p"] * count, [{}] * count)
    killer.join()
    remote.close()
    assert doomed.poll() is not None
    torch.testing.assert_close(scores, random_images(count).mean((1, 2, 3)))
    assert not reasons

    spec = RewardSpec(name=name, reward=alone, executor=alone)
    began = time.monotonic()
    result = score([spec], random_images(4), ["a b"] * 4, [{}] * 4)
    alone.close()
    assert time.monotonic() - began < 1.0 + PATIENCE
    assert result.scores.isnan().all()
    message = result.errors[name]
    for words in ("4 of 4 images", first, "cannot be reached", "see that a server", "'a b'"):
        assert words in message


def kill_when_asked(process: subprocess.Popen, mark: Path) -> None:
    while not mark.exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.05)
    process.kill()
    process.wait()
