"""What a run of two stages cost, beside what the cost model says of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from flowrl.errors import UserError
from flowrl.quantization.precision import Resolved, named
from flowrl.sampling.cost import break_even_gain, two_stage_ratio

ALLOWED = 1.10  # the measured ratio by the predicted one: what the cost model leaves out
SECONDS = ("single", "two", "exact_step", "low_step", "peft_step", "finish")
Seconds = dict[str, float]

# What the numbers of a row are called for people; those that `verdict` tells are not among them.
LABELS = {
    "model": "model",
    "size": "size",
    "plan": "kept/candidates@their steps/steps",
    "layers": "layers",
    "pixels": "side of a picture, pixels",
    "precision": "precision of candidates",
    "native": "computed natively",
    "compiled": "compiled",
    "quantised_layers": "quantised layers",
    "quantised_share": "quantised share of weights",
    "cheap_copy_gb": "low-bit copy, GB",
    "exact_copy_gb": "exact copy, GB",
    "device": "device",
    "prompts": "prompts",
    "batch": "pictures in one forward",
    "keep": "K: kept of a prompt",
    "candidates": "N: candidates of a prompt",
    "preview_steps": "steps of a candidate",
    "steps": "steps of a kept picture",
    "single": "all N exactly, s",
    "two": "two stages, s",
    "exact_step": "an exact step, s a picture",
    "low_step": "a candidate's step, s a picture",
    "peft_step": "a step as trained, s a picture",
    "finish": "decode and score, s a picture",
    "q": "q: low-bit speed factor",
    "phi": "phi: fixed cost a picture",
    "measured": "measured ratio",
    "predicted": "predicted ratio",
    "q_to_break_even": "q from which two stages pay",
    "to_uncompiled_peft": "ratio to N with uncompiled PEFT",
    "recompiled": "graphs compiled again",
    "peak_memory_gb": "peak memory, GB",
}


def labelled(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for people: a line for each of its numbers that has a label."""
    return [{"what": LABELS[name], "is": row[name]} for name in row if name in LABELS]


def verdict(row: Mapping[str, Any]) -> str:
    """One sentence: what was measured beside what the cost model predicted."""
    within = "within" if row["of_predicted"] <= row["allowed"] else "above"
    return (
        f"measured {row['measured']:.3f}, predicted {row['predicted']:.3f}: "
        f"{row['of_predicted']:.2f} times, {within} {row['allowed']:.2f}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many of how many pictures of a prompt are kept, and steps to explore and regenerate.

    Raises UserError for counts the cost model does not know.
    """

    keep: int
    candidates: int
    preview_steps: int
    steps: int

    def __post_init__(self) -> None:
        try:
            self.ratio(1.0, 0.0)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not 2 <= self.preview_steps <= self.steps:
            raise UserError(
                f"the counts {self} draw candidates in {self.preview_steps} steps, expected 2 to "
                f"the {self.steps} of a kept picture"
            )

    def ratio(self, gain: float, fixed: float) -> float:
        """By the cost model, see `two_stage_ratio`."""
        return two_stage_ratio(**asdict(self), gain=gain, fixed=fixed)

    def scaled(self, factor: float) -> "Counts":
        """Fewer pictures in the same proportion. Raises UserError where they are not whole."""
        keep, candidates = self.keep * factor, self.candidates * factor
        if keep < 1 or keep != int(keep) or candidates != int(candidates):
            raise UserError(
                f"a scale of {factor:g} makes {keep:g} of {candidates:g} candidates of {self}: "
                "whole numbers are expected, such as by 0.5, 0.25 or 0.125"
            )
        return replace(self, keep=int(keep), candidates=int(candidates))

    def __str__(self) -> str:
        return f"{self.keep}/{self.candidates}@{self.preview_steps}/{self.steps}"


# Sol-RL's own (2604.06916), and a wider first stage of fewer steps.
PUBLISHED = Counts(keep=24, candidates=96, preview_steps=6, steps=10)
WIDER = Counts(keep=16, candidates=128, preview_steps=4, steps=10)


def parse_counts(text: str) -> Counts:
    """24/96@6/10: kept / candidates @ steps of a candidate / of a kept one. Raises UserError."""
    try:
        kept, taken = text.split("@")
        keep, candidates, preview_steps, steps = map(int, (*kept.split("/"), *taken.split("/")))
    except ValueError as error:
        raise UserError(
            f"the counts are {text!r}, expected kept/candidates@steps of a candidate/steps of a "
            "kept picture such as 24/96@6/10"
        ) from error
    return Counts(keep=keep, candidates=candidates, preview_steps=preview_steps, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Best seconds of one run. single: drawing all candidates exactly; two: both stages; split: its
    parts, which add up. counts: of each of the prompts.

    Of one full batch, a picture: exact_step, low_step, peft_step, a step of the exact network, of
    the one that explores, and of the network as it is trained, its adapter beside the weights and
    not compiled; finish, decoding and scoring. graphs: compiled after the first round, over several
    changes of the adapter. memory: most bytes at once during both stages, None on a CPU.
    """

    device: str
    prompts: int
    counts: Counts
    batch: int
    single: float
    two: float
    split: Seconds
    exact_step: float
    low_step: float
    peft_step: float
    finish: float
    graphs: int
    memory: int | None

    @property
    def gain(self) -> float:
        """q: how many times as fast as an exact step one of exploring is."""
        return self.exact_step / self.low_step

    @property
    def fixed(self) -> float:
        """phi: decoding and scoring a picture, by drawing it in exact steps."""
        return self.finish / (self.counts.steps * self.exact_step)

    @property
    def measured(self) -> float:
        return self.two / self.single

    @property
    def predicted(self) -> float:
        """By the cost model with the gain and the fixed cost of this run."""
        return self.counts.ratio(self.gain, self.fixed)

    @property
    def to_peft(self) -> float:
        """Two stages by one stage of the network as it is trained, which is computed from its
        seconds a step: the published baseline (2604.06916)."""
        pictures = self.prompts * self.counts.candidates
        return self.two / (pictures * (self.counts.steps * self.peft_step + self.finish))

    def row(self) -> dict[str, Any]:
        """For programs; LABELS has the names for people."""
        pictures, ratio = asdict(self.counts), self.measured / self.predicted
        seconds = {name: getattr(self, name) for name in SECONDS}
        found = {"q": self.gain, "phi": self.fixed, "measured": self.measured}
        found |= {"predicted": self.predicted, "of_predicted": ratio, "allowed": ALLOWED}
        found |= {"q_to_break_even": break_even_gain(**pictures, fixed=self.fixed)}
        found |= {"to_uncompiled_peft": self.to_peft, "recompiled": self.graphs}
        memory = {"peak_memory_gb": self.memory and self.memory / 1e9}
        where = {"device": self.device, "prompts": self.prompts, "batch": self.batch}
        return where | pictures | seconds | found | memory | {"split": self.parts()}

    def parts(self) -> list[dict[str, Any]]:
        """The split of both stages: seconds, and the share of them all."""
        return [
            {"part": name, "seconds": seconds, "share": seconds / self.two}
            for name, seconds in self.split.items()
        ]


def columns_of(resolved: Resolved) -> dict[str, Any]:
    """What a precision became, for a row."""
    return {"precision": named(resolved), "native": resolved.native}


@contextmanager
def own_words() -> Iterator[None]:
    """Where no layer is left to be quantised, name the option of a bench that changes it."""
    try:
        yield
    except UserError as error:
        told, nothing, _ = str(error).partition("is left to be quantised")
        if not nothing:
            raise
        raise UserError(f"{told}{nothing}: give --min-dim 0, or a precision of bf16") from error
