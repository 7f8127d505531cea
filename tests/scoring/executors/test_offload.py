"""Networks of rewards that wait on the CPU: when they move, and that scores stay as they are."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowrl.config.rewards import InlineOptions
from flowrl.errors import UserError
from flowrl.objectives.reward_backprop.decoder import check_differentiable
from flowrl.scoring.executors.base import InlineExecutor, networks_of, park, restore
from flowrl.scoring.spec import RewardSpec

IMAGES = torch.zeros(1, 3, 2, 2)


class Network(nn.Module):
    """Says that it is on a GPU, and where it is moved."""

    def __init__(self):
        super().__init__()
        self.place, self.moves = torch.device("cuda:1"), []

    def parameters(self, recurse=True):
        yield SimpleNamespace(device=self.place)

    def to(self, device):
        self.place = torch.device(device)
        self.moves.append(str(self.place))
        return self


class Reward:
    """Scores by a network deep inside, which it holds as the built-in rewards do."""

    def __init__(self, network: Network):
        self.encoder = SimpleNamespace(_shared=SimpleNamespace(_network=(network, 3.0)))

    @functools.cached_property
    def loaded(self):
        return {"again": self.encoder._shared._network}

    def __call__(self, images, prompts, metadata):
        network, _ = self.loaded["again"]
        assert network.place.type == "cuda"
        return images.mean((1, 2, 3))


def ask(executor):
    return executor.submit(IMAGES, ["p"], [{}])


def test_a_network_waits_on_the_cpu_after_all_that_was_asked_is_answered():
    network = Network()
    reward = Reward(network)
    executor = InlineExecutor(reward, "r", InlineOptions(offload=True))
    for _ in range(2):
        answers = [ask(executor), ask(executor)]
        assert answers[0].result().scores.tolist() == [0.0]
        assert network.place.type == "cuda"
        answers[1].result()
        assert network.place.type == "cpu"
    assert network.moves == ["cpu", "cuda:1", "cpu"]
    assert networks_of(reward) == [network]


def test_a_reward_that_shares_a_parked_network_gets_it_back():
    network = Network()
    ask(InlineExecutor(Reward(network), "a", InlineOptions(offload=True))).result()
    assert network.place.type == "cpu"
    assert not ask(InlineExecutor(Reward(network), "b")).result().reasons
    assert network.place.type == "cuda"


def test_networks_on_the_cpu_stay_and_nothing_is_moved_where_it_did_not_lie():
    real = SimpleNamespace(network=nn.Linear(2, 2))
    before = real.network.weight
    park(real), restore(real)
    assert real.network.weight is before


def test_offloading_is_refused_where_the_network_is_needed_all_the_time():
    with pytest.raises(ValueError, match="background and offload are both true"):
        InlineOptions(background=True, offload=True)
    reward = Reward(Network())
    reward.differentiable = True  # type: ignore[attr-defined]
    spec = RewardSpec(
        name="r", reward=reward, executor=InlineExecutor(reward, "r", InlineOptions(offload=True))
    )
    with pytest.raises(UserError, match="set executor.offload to false"):
        check_differentiable([spec], "refl")


@pytest.mark.gpu
def test_scores_on_a_gpu_stay_the_same_to_the_bit():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 1)).cuda()

    class Scored:
        def __init__(self):
            self.network = network

        def __call__(self, images, prompts, metadata):
            return self.network(images.cuda()).flatten()

    images = torch.rand(5, 3, 8, 8)
    asked = images, ["p"] * 5, [{}] * 5
    stays = InlineExecutor(Scored(), "stays").submit(*asked).result().scores
    offloaded = InlineExecutor(Scored(), "moves", InlineOptions(offload=True))
    for _ in range(2):
        assert torch.equal(offloaded.submit(*asked).result().scores, stays)
        assert next(network.parameters()).device.type == "cpu"
