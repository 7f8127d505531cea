"""The words of gallery/solrl, which `compare_solrl.py` writes."""

INTRODUCTION = """`python -m scripts.compare.solrl`, on {machine}. The built-in pipeline learns
GenEval's partial score with DiffusionNFT from its base weights, seeds {seeds}: always from
{rollout.group_size} images of each of {rollout.prompts} prompts, in {iterations} iterations of
{updates} updates. *24 of 24* draws these alone. *24 of 96* draws {explore.candidates} candidates of
each prompt first, in {explore.steps} steps instead of {rollout.steps} and in NVFP4, and then those
with the {best} highest and the {worst} lowest scores exactly, from the same noise; the candidates'
scores are not learned from.

Scores are those of {images} images of unseen prompts. A change is that of the last evaluation
from the first, image by image, averaged over the seeds first, with its paired 95 % bootstrap
interval; *above* compares arms in the same way, after the same number of updates. These intervals
know how images differ, not how seeds do: for that compare the columns. *images* are those drawn
to learn from, *candidates* those drawn beside them only to choose by. *seconds* are those of
iterations without evaluations, candidates and audits included. The last columns say what it took
until the mean curve, straight between evaluations, first stood where that of 24 of 24 ends, and
what share that is of its cost.

NVFP4 is emulated here, with its numbers but not its speed. So the charts against iterations show
what the choice is worth per update, and those against wall time what it costs on this machine, not
on one that multiplies NVFP4. Only the image stream's feed-forward layers are quantised, as in
Sol-RL's rules for SD3.5-Large. `curves.csv` has every evaluation of every run."""
TIME = """## Where the time goes

Seconds of an iteration, means over iterations and seeds. *audit* draws all candidates of some
prompts both ways before some iterations, and makes the network that explores; *explore reward* and
*reward* are the waits for scores.

{table}
"""
AUDITED = """Before some iterations all candidates of its prompts are also drawn exactly. tau and
rho are Kendall's and Spearman's within a prompt, averaged over the prompts that have one; *pooled
rho* is that of all together. Of the best and the worst half of the choice: *overlap*, the share
that a choice by exact scores has too, which of equal ones takes the first; *rank*, their mean exact
rank, 1 the highest, ties averaged; *perfect*, that of a choice by exact scores; at random it is
48.5 of 96. *contrast* is the difference of exact scores between the halves, as a share of the
largest possible. *no rho* counts prompts whose scores are all equal."""
AUDITS = """## Do candidates rank as exact images do?

{text}

{table}
"""
BASE = """`flowrl audit {preset} --prompts {prompts} {options}`, with other precisions and layers,
on the pipeline before any training: {candidates} candidates of each prompt, compared by their
partial score with the same ones in {steps} exact steps. *layers* is the share of all weights that
is quantised: of the image stream's feed-forward layers alone (`min_dim: 128`, as in the preset),
or of attention, too (`min_dim: 0`). A rho of 0.8 takes 7 of 8 steps in NVFP4, or 5 with four over
six (`four_over_six: true`, 4/6 in the table), and with attention in four bits it is not reached."""
TRIED = """What limits the gain here, as measured while the recipe was made. At the base, over the
four prompts of an iteration, the share of the gradient's power that repeats from iteration to
iteration is 0.165 for 24 of 24 (24 iterations) and 0.244 for 24 of 96 (16), which is 1.6 times the
information in an update. Where noise does not limit learning that shows in nothing: with updates
from two prompts each, two an iteration, 36 iterations and `optim.lr` 8e-4 the partial scores ended
at 0.798, 0.798 and 0.802 with 24 of 96 (four over six) and at 0.821, 0.787 and 0.795 with 24 of 24.
So the preset updates from one prompt at a time. A score of few values bounds the gain, too: where
half of a prompt's images are right, any 24 have as much contrast as can be. And as the policy
learns, candidates rank less well: one that fails is then often made to fail by few steps alone."""
RECIPES = """## Recipes

`flowrl train {preset}`, with

| arm | changes |
|---|---|
{recipes}
"""
