"""Rewards: one file, one class, one call.

A reward is any callable

    reward(images, prompts, metadata) -> scores

with `images` a (B, 3, H, W) float tensor in [0, 1], `prompts` a list of B strings, `metadata` a
list of B dicts, and `scores` a (B,) float32 tensor or a list of B floats. A score that could not
be computed is NaN, never 0; to say why, return `(scores, reasons)` with reasons {row: text}. An
exception becomes the reason of all scores of the call; one with the attribute `ends_run = True`
ends the run, with a checkpoint, when the reward is trained. Optional attributes:

    name               str, for reports
    bounds             (low, high), either may be None
    differentiable     True when gradients reach the images
    required_metadata  keys that a prompt's metadata must have; the reward does not apply to others
    applies            (prompt, metadata) -> bool, when keys alone cannot tell
    check              (prompt, metadata), raises ValueError for a prompt that it applies to and
                       cannot score; called for every prompt before sampling begins
    scope              "sample", or "group" when all images of a prompt are scored together
    version            one string for everything that changes the scores
    deterministic      False when the same images may get other scores
    fixtures           () -> images of known order (`flowrl_rewards.fixtures.fixture`), on which
                       `flowrl reward-check` and every run try it

The files are in the folder `rewards` of a clone, import nothing from `flowrl` and each other by
relative names: copy the folder, or write your own anywhere and name it as
`my_package.my_module:MyReward`. They are imported as `flowrl_rewards`, from a clone or installed,
so that the name `rewards` stays free for your own modules.
"""

from pathlib import Path

if not Path(__file__).with_name("fixtures.py").exists():  # a clone, not an installed wheel
    __path__[:] = [str(Path(__file__).parent.parent / "rewards")]
