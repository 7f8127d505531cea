"""The page of two-stage rollouts: its tables are what the code says, its recipes are possible."""

import re
import shlex
from pathlib import Path

import torch
import typer
import yaml

from flowrl.cli import app
from flowrl.config import load_config, parse_config
from flowrl.config.arguments import sort_arguments
from flowrl.planning.model_specs import MODEL_SPECS, build_transformer
from flowrl.quantization.backends import FP8Dequantised, NVFP4Emulated
from flowrl.quantization.layer_rules import choose_layers, quantised_share, rules_of
from flowrl.sampling.two_stage import break_even_gain, two_stage_ratio

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sol-rl.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
RECIPES = [words for words in COMMANDS if words[0] in ("train", "collect")]


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    (table,) = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip(" `") for cell in line[1:-1].split("|")] for line in table.splitlines()]


def test_the_costs_on_the_page_are_those_of_the_cost_model():
    table = rows("N")
    assert len(table) >= 8
    for n, k, steps, gain, fixed, by_all, by_kept, pays in table:
        preview, whole = map(int, steps.split(" of "))
        counts = {"candidates": int(n), "keep": int(k), "preview_steps": preview, "steps": whole}
        ratio = two_stage_ratio(**counts, gain=float(gain), fixed=float(fixed))
        assert by_all == f"{ratio:.2f}"
        assert by_kept == f"{ratio * int(n) / int(k):.2f}"
        assert pays == f"{break_even_gain(**counts, fixed=float(fixed)):.2f}"
        assert ratio * int(n) / int(k) > 1  # "dearer, never cheaper"


def test_layers_that_are_quantised_are_those_of_the_table():
    table = {name: (what, share) for name, what, share, _ in rows("pipeline")}
    assert set(table) == set(MODEL_SPECS)
    for name, (_, share) in table.items():
        network = build_transformer(name, device="meta", dtype=torch.bfloat16)
        choices = choose_layers(network, rules_of(network), "nvfp4")
        assert share == f"{quantised_share(choices):.0%}".replace("%", " %")
        made = {re.sub(r"\d+", "*", c.name) for c in choices if c.format}
        if name.startswith("sd3.5"):
            assert made == {f"transformer_blocks.*.ff.net.*{end}" for end in ("", ".proj")}
        if name.startswith("sana"):
            parts = ("conv_inverted", "conv_point")
            assert made == {f"transformer_blocks.*.ff.{part}" for part in parts}


def test_products_err_as_much_as_the_page_says():
    for backend, told in [(NVFP4Emulated(), "13 %"), (FP8Dequantised(), "4 %")]:
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 1024, generator=generator) for n in (256, 512))
        exact = x.double() @ weight.double().T
        error = (backend.matmul(x, backend.pack(weight)).double() - exact).norm() / exact.norm()
        assert f"{error.item():.0%}".replace("%", " %") == told
        assert told in PAGE


def test_recipes_and_commands_of_the_page_are_possible():
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        given = {"prompts": {"train": "tiny:all:train"}, "rewards": [{"name": "ocr"}]}
        assert parse_config(given | yaml.safe_load(text))
    for words in RECIPES:
        group = typer.main.get_command(app)
        command = group.get_command(typer.Context(group), words[0])
        context = command.make_context(words[0], words[1:])
        request = sort_arguments(context.params["words"])
        config = load_config(request.recipe, request.overrides)
        assert (config.rollout.explore is None) == (config.rollout.store is not None)
    others = [words for words in COMMANDS if words not in RECIPES]
    assert {words[0] for words in others} == {"audit", "bench"}
    for words in others:
        command, path = typer.main.get_command(app), []
        while hasattr(command, "commands"):
            path.append(words[len(path)])
            command = command.get_command(typer.Context(command), path[-1])
            assert command is not None, f"there is no command {' '.join(path)}"
        command.make_context(path[-1], words[len(path) :])
