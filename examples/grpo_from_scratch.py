"""Flow-GRPO (arXiv 2505.05470) in one file, from a diffusers pipeline to a LoRA file.

    python examples/grpo_from_scratch.py

Read it from top to bottom: it is the algorithm that `flowrl train` runs, without recipes, trees,
checkpoints and several processes, and with the same numbers: without the average over updates
(`ema.decay=null`, `rollout.merge_lora=false`) its losses and its LoRA are those of `flowrl train`,
bit for bit (tests/examples/test_grpo_from_scratch.py).

The idea. A flow model turns noise (sigma = 1) into an image (sigma = 0) along an ODE, which leaves
reinforcement learning nothing to choose. Flow-GRPO adds noise to some of the denoising steps and
corrects their drift, so that each of them becomes a Gaussian policy

    x_next ~ N(mean(x, v), std^2),    v = the network's velocity,

whose likelihood is known. Several images of each prompt are sampled and scored; those above their
group's average get a positive advantage; and the network is trained to make the steps that led
to them more likely, with PPO's clipped ratio, and a penalty that keeps it near the base model.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor

from flowrl.backbones.families import SD3
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.text_cache import TextCache
from flowrl.config.objectives import AdvantageOptions
from flowrl.functional.gaussian import log_ratio
from flowrl.functional.noise import keyed_noise, noise_seed
from flowrl.functional.sde import flow_sde_noise, ode_step, sde_step, squared_distance
from flowrl.objectives.advantage import clip_advantage, z_scores
from flowrl.objectives.grpo import clipped_surrogate
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.trajectory import Conditioning


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Those of `flowrl train quickstart-grpo`; in brackets the option of a recipe."""

    seed: int = 0  # [run.seed]
    iterations: int = 170  # [run.iterations]
    prompts_per_iteration: int = 6  # [rollout.prompts_per_iteration]
    group_size: int = 16  # images of each prompt [rollout.group_size]
    num_inference_steps: int = 8  # [rollout.num_inference_steps]
    noisy_steps: int = 2  # the first ones have noise and are learned from [rollout.tree.window]
    noise_level: float = 1.0  # [rollout.noise_level]
    clip_nats: float = (
        6.5  # the clip on a step's log-ratio, summed over the latent [objective.clip_nats]
    )
    kl_coef: float = 0.0005  # weight of the penalty below [objective.kl_coef]
    learning_rate: float = 8e-4  # falls linearly to 0 [optim.lr, optim.schedule]
    max_grad_norm: float = 1.0  # [optim.max_grad_norm]
    decode_batch: int = 16  # images that the autoencoder decodes at once [pipeline.decode_batch]


LORA = LoraConfig(
    r=16,
    lora_alpha=32,
    init_lora_weights="gaussian",  # A is random and B is 0: the fresh LoRA changes nothing
    target_modules=list(SD3.lora_targets),  # the joint attention, of images and of text
)


@dataclass(frozen=True)
class NoisyStep:
    """One stochastic denoising step of all N images: an action, and the policy that chose it."""

    x: Tensor  # (N, *latent) the state
    x_next: Tensor  # (N, *latent) the action
    mean_old: Tensor  # (N, *latent) mean of the Gaussian that x_next was drawn from
    sigma: Tensor  # () noise level of x
    sigma_next: Tensor  # () noise level of x_next
    g: Tensor  # () strength of the noise


def main(settings: Settings, folder: Path, prompts: str = "tiny:geneval:train") -> list[float]:
    """Train a LoRA of the built-in tiny SD3, save it to `folder`; return each iteration's loss."""
    s = settings
    pipeline = load_pipeline("tiny-sd3", dtype="fp32", device="cpu")
    backbone = PipelineBackbone(pipeline, guidance=1.0, max_sequence_length=12)

    # The policy is the frozen network plus a LoRA; without the LoRA it is the reference.
    network = pipeline.transformer.requires_grad_(False).eval()
    torch.manual_seed(s.seed)
    network.add_adapter(LORA)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=s.learning_rate, weight_decay=1e-4)

    # Each kind of prompt in turn; the reward is the share of a prompt's demands that are met.
    sampler = PromptSampler(load_prompts(prompts), s.prompts_per_iteration, s.seed, balance="tag")
    reward = RewardSpec(name="geneval", reward=load_reward("geneval", {"mode": "partial"}))
    encode = TextCache(backbone)

    losses = []
    for iteration in range(s.iterations):
        batch = sampler.at(iteration)
        # (N, ...) text embeddings, the images of a prompt side by side: its group
        cond = encode(batch).take(torch.arange(len(batch)).repeat_interleave(s.group_size))
        x0, steps = sample(backbone, cond, batch, iteration, s)
        rewards = score_images(backbone, x0, batch, reward, s)
        advantage = group_advantages(rewards, s.group_size)
        optimizer.param_groups[0]["lr"] = s.learning_rate * (1 - iteration / s.iterations)
        losses.append(update(backbone, optimizer, parameters, steps, cond, advantage, s))
        print(f"{iteration + 1}: reward {rewards.mean():.3f}, loss {losses[-1]:+.5f}", flush=True)
    save_lora(pipeline, folder, adapter="default")
    return losses


@torch.no_grad()
def sample(
    backbone: PipelineBackbone,
    cond: Conditioning,
    batch: list[PromptRecord],
    iteration: int,
    s: Settings,
) -> tuple[Tensor, list[NoisyStep]]:
    """Denoise N = prompts x group_size latents; return them (N, *latent) and the noisy steps."""

    def noise(step: int, role: str) -> Tensor:
        """Each image's noise depends on its name alone: neither on the batch nor on the order."""
        seeds = [
            noise_seed(seed=s.seed, iteration=iteration, prompt=p.uid, root=k, step=step, role=role)
            for p in batch
            for k in range(s.group_size)
        ]
        return keyed_noise(seeds, backbone.latent_shape(), device=backbone.device)

    sigmas = backbone.sigmas(s.num_inference_steps)  # (T+1,) from 1 to 0
    g = flow_sde_noise(sigmas, s.noise_level)  # (T,)
    x, noisy = noise(0, "init"), []
    for i in range(s.num_inference_steps):
        v = backbone.velocity(x, sigmas[i], cond)
        if i >= s.noisy_steps:  # the pipeline's own Euler step
            x, _ = ode_step(x, v, sigmas[i], sigmas[i + 1], g[i])
            continue
        mean, std = sde_step(x, v, sigmas[i], sigmas[i + 1], g[i])
        x_next = mean + std.view(-1, 1, 1, 1) * noise(i, "step")
        noisy.append(NoisyStep(x, x_next, mean, sigmas[i], sigmas[i + 1], g[i]))
        x = x_next
    return x, noisy


@torch.no_grad()
def score_images(
    backbone: PipelineBackbone,
    x0: Tensor,
    batch: list[PromptRecord],
    reward: RewardSpec,
    s: Settings,
) -> Tensor:
    """Decode latents (N, *latent) and return the images' rewards (N,)."""
    images = torch.cat([backbone.decode(part).cpu() for part in x0.split(s.decode_batch)])
    asked = [prompt for prompt in batch for _ in range(s.group_size)]
    result = score([reward], images, [p.text for p in asked], [p.metadata for p in asked])
    return result.scores[:, 0]


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(N,) (reward - mean of its prompt's images) / std of all images: groups replace a critic."""
    group = torch.arange(len(rewards)) // group_size
    return clip_advantage(z_scores(rewards, group, AdvantageOptions(scale="global"))).float()


def update(
    backbone: PipelineBackbone,
    optimizer: torch.optim.Optimizer,
    parameters: list[Tensor],
    steps: list[NoisyStep],
    cond: Conditioning,
    advantage: Tensor,
    s: Settings,
) -> float:
    """One optimiser step on all noisy steps; return the loss, their mean."""
    total = 0.0
    for step in steps:  # one after the other, so that only one graph is held
        loss = grpo_loss(backbone, step, cond, advantage, s)
        (loss * (1 / len(steps))).backward()
        total += loss.item() / len(steps)
    torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def grpo_loss(
    backbone: PipelineBackbone, step: NoisyStep, cond: Conditioning, advantage: Tensor, s: Settings
) -> Tensor:
    """-min(r A, clip(r) A) + kl_coef |v - v_ref|^2, averaged over the N images. (scalar)"""
    # The same state, the network as it is now: its Gaussian, and how likely the action is in it.
    v = backbone.velocity(step.x, step.sigma, cond)
    mean, std = sde_step(step.x, v, step.sigma, step.sigma_next, step.g)
    log_r = log_ratio(step.x_next, mean, step.mean_old, std)  # 0 in the first update
    # Log-ratios are means over the latent, as published; so the clip is divided by its size.
    clip = s.clip_nats / step.x[0].numel()
    surrogate, _ = clipped_surrogate(log_r, advantage, clip, clip)
    with torch.no_grad():
        backbone.transformer.disable_adapters()
        v_ref = backbone.velocity(step.x, step.sigma, cond)
        backbone.transformer.enable_adapters()
    return surrogate.mean() + s.kl_coef * squared_distance(v, v_ref).mean()


if __name__ == "__main__":
    main(Settings(), Path("runs/from-scratch"))
