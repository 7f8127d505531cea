"""Compiled blocks follow weights and adapters, and nothing is compiled anew after an iteration."""

import functools

import pytest
import torch
from policies import compiler, disturb
from torch import nn
from torch._dynamo import config
from torch._dynamo.utils import counters

from flowrl.assembly import learner as assembly
from flowrl.backbones import policy as policies_module
from flowrl.backbones.compiling import compile_blocks
from flowrl.errors import UserError, phase
from flowrl.utils.distributed import Runtime


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Network(nn.Module):
    """Blocks of one width in a list, as transformers have them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.fixture
def limited():
    torch.compiler.reset()
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch.compiler.reset()


@torch.no_grad()
def test_blocks_of_one_kind_share_a_graph_and_follow_weights_written_in_place(limited):
    network, eager = Network(4, 4, 4), Network(4, 4, 4)
    compile_blocks(network, backend="aot_eager")
    start = counters["stats"]["unique_graphs"]
    for seed in range(3):
        for parameter in network.parameters():
            parameter.copy_(randn(*parameter.shape, seed=seed))
        eager.load_state_dict(network.state_dict())
        assert torch.equal(network(randn(3, 4, seed=7)), eager(randn(3, 4, seed=7)))
        assert counters["stats"]["unique_graphs"] == start + 1
    network(randn(5, 4, seed=8))
    assert counters["stats"]["unique_graphs"] == start + 2


@torch.no_grad()
def test_more_graphs_than_the_limit_are_an_error_and_not_silently_uncompiled(limited):
    network = Network(4)
    compile_blocks(network, backend="eager")
    config.recompile_limit = 3
    for rows in (2, 3, 4):
        network(randn(rows, 4, seed=0))
    start = counters["stats"]["unique_graphs"]
    with pytest.raises(UserError, match=r"rollout\.batch_size"), phase("rollout"):
        network(randn(5, 4, seed=0))
    assert counters["stats"]["unique_graphs"] == start


# Numbers of images and of rows to learn from that no batch divides.
RAGGED = {"prompts_per_iteration": 3, "group_size": 3, "num_inference_steps": 4, "batch_size": 7}
NFT = {"kind": "nft", "noising": {"count": 1}}, {"kind": "ode"}
GRPO = {"kind": "grpo", "kl_coef": 0.01}, {"kind": "flow_grpo"}


@pytest.mark.slow
@pytest.mark.parametrize("method", [GRPO, NFT])
def test_no_graph_is_compiled_after_the_first_iteration(
    tiny_config, load_tiny, monkeypatch, method
):
    # Graphs are the same whatever generates their code.
    compiled = functools.partial(compile_blocks, backend="eager")
    monkeypatch.setattr(assembly, "compile_blocks", compiled)
    torch.compiler.reset()
    objective, tree = method
    config = tiny_config(
        pipeline={"compile": True}, objective=objective, optim={"micro_batch": 4},
        rollout=RAGGED | {"tree": tree},
    )  # fmt: skip
    provided = assembly.ProvidedObjects(pipeline=load_tiny())
    learner = assembly.build_learner(config, Runtime(device="cpu"), provided)
    start = counters["stats"]["unique_graphs"]
    learner.iterate(0)
    warm = counters["stats"]["unique_graphs"]
    assert warm > start
    for number in range(1, 50):
        learner.iterate(number)
    assert counters["stats"]["unique_graphs"] == warm


@pytest.mark.slow  # minutes of compiling
@compiler
def test_gradients_of_compiled_blocks_are_those_of_plain_ones(tiny_config, load_tiny):
    config = tiny_config(pipeline={"compile": True}, rollout=RAGGED)
    provided = assembly.ProvidedObjects(pipeline=load_tiny())
    learner = assembly.build_learner(config, Runtime(device="cpu"), provided)
    backbone, policy = learner.policy.backbone, learner.policy
    disturb(policy, 0.02)
    cond = backbone.encode(["a red circle", "a blue square"], ["", ""])
    x = randn(2, *backbone.latent_shape(), seed=0)
    gradients = []
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            policy.velocity(x, torch.tensor(0.7), cond).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        learner.optimizer.zero_grad()
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_steps_begin_at_each_forward_of_sampling_and_each_micro_batch_and_change_nothing(
    tiny_config, load_tiny, monkeypatch
):
    begun = []
    monkeypatch.setattr(policies_module, "begin_step", lambda: begun.append(1))

    def weights(graphs: bool) -> list[torch.Tensor]:
        config = tiny_config(rollout=RAGGED | {"merge_lora": False}, optim={"micro_batch": 4})
        provided = assembly.ProvidedObjects(pipeline=load_tiny())
        learner = assembly.build_learner(config, Runtime(device="cpu"), provided)
        if graphs:
            learner.policy.replay_graphs()
        for number in range(2):
            learner.iterate(number)
        return [parameter.detach() for parameter in learner.policy.parameters()]

    plain = weights(graphs=False)
    assert not begun
    assert all(map(torch.equal, plain, weights(graphs=True)))
    # 9 images at most 7 at a time and 4 steps, then their 3 noisy ones at most 4 at a time.
    assert len(begun) == 2 * (2 * 4 + -(-9 * 3 // 4))


@pytest.mark.gpu
def test_learning_by_cuda_graphs_is_that_of_plain_blocks(tiny_config):
    def learned(compile):
        torch.compiler.reset()
        config = tiny_config(
            pipeline={"device": "cuda", "compile": compile},
            rollout=RAGGED | {"merge_lora": False}, optim={"micro_batch": 4},
        )  # fmt: skip
        learner = assembly.build_learner(config, Runtime(device="cuda"), assembly.ProvidedObjects())
        start = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        for number in range(3):
            learner.iterate(number)
        return torch.cat([p.detach().flatten() for p in learner.policy.parameters()]) - start

    plain, graphs = learned(False), learned("graphs")
    assert (graphs - plain).norm() <= 0.05 * plain.norm()
