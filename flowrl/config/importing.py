"""Recipes of other projects as flowrl's: Flow-Factory's YAML, flow_grpo's config functions.

Files are parsed, never run. What has a counterpart becomes an option; everything else is listed
with its value, and so are defaults of the other project that flowrl does not share.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowrl.config import parse_config
from flowrl.config.load import load_yaml
from flowrl.errors import UserError

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A recipe of flowrl, and what of the other one it leaves out."""

    source: str
    recipe: Tree
    left_out: list[str]  # "KEY = VALUE: why", and known differences


def import_recipe(source: str, *, gpus: int | None = None) -> Imported:
    """Read FILE.yaml of Flow-Factory, or FILE.py:NAME of flow_grpo.

    gpus: that the recipe was for, where the file does not say.

    Raises UserError for a file of neither project.
    """
    name, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    path = Path(name or source)
    if not path.is_file():
        raise UserError(f"there is no recipe {path}")
    if path.suffix == ".py":
        return _of_flow_grpo(source, *_config_of(path, function), gpus)
    if path.suffix in (".yaml", ".yml"):
        try:
            values = load_yaml(path.read_text("utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise UserError(f"cannot read {path}: it is not UTF-8 text") from error
        if not isinstance(values, dict) or not {"model", "train"} <= set(values):
            raise UserError(
                f"{path} is no recipe of Flow-Factory, which has the sections model and train"
            )
        return _of_flow_factory(source, values)
    raise UserError(f"{source}: expected FILE.yaml of Flow-Factory, or FILE.py:NAME of flow_grpo")


def recipe_text(imported: Imported) -> str:
    """Return the recipe as YAML, what it leaves out in comments above it.

    Raises UserError, with the list, for a recipe that flowrl does not take.
    """
    lines = [f"# Imported from {imported.source}. Without counterpart, or different:"]
    lines += [f"#   {' '.join(line.split())}" for line in imported.left_out]
    try:
        parse_config(imported.recipe)
    except UserError as error:
        rest = "".join(f"\n  {' '.join(line.split())}" for line in imported.left_out)
        raise UserError(
            f"{imported.source} was read, but {error}\nWithout counterpart, or different:{rest}"
        ) from error
    body = yaml.safe_dump(imported.recipe, sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + "\n" + body


# --- what both share ----------------------------------------------------------------------------

FAMILIES = {
    "stable-diffusion-3": "sd3", "sd3": "sd3", "flux.1": "flux", "flux1": "flux", "sana": "sana",
}  # fmt: skip
OTHERS = ("kontext", "fill", "redux", "canny", "depth", "sprint", "video")  # that edit or film
REWARDS: dict[str, Tree] = {  # their names -> ours
    "jpeg_compressibility": {"name": "compressibility"},
    "jpeg_incompressibility": {"name": "incompressibility"},
    "aesthetic": {"name": "aesthetic"},
    "pickscore": {"name": "pickscore", "transform": {"kind": "affine", "scale": 1 / 26}},
    "imagereward": {"name": "imagereward"},
    "clipscore": {"name": "clipscore"},
    "clip": {"name": "clipscore"},
    "hpsv2": {"name": "hpsv2"},
    "hpsv3": {"name": "hpsv3"},
    "ocr": {"name": "ocr"},
    "geneval": {"name": "geneval", "args": {"detector": "mask2former", "colors": "clip"}},
    "unifiedreward": {"name": "vlm_judge", "args": {"rubric": "unified_reward"}},
}


# Of Flow-Factory's rewards: read, or without meaning for scores.
KNOWN_OF_REWARD = {"name", "reward_model", "weight", "server_url", "batch_size", "device", "dtype"}


@dataclass(frozen=True, slots=True)
class Unread:
    """An expression of a config function that would have to be run."""

    text: str

    def __repr__(self) -> str:
        return f"<{self.text}>"


@dataclass(slots=True, kw_only=True)
class _Source:
    """The other recipe: values by dotted key, and which have been used."""

    source: str
    values: Mapping[str, Any]
    last: str = ""  # the key that was taken last, for errors
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value. Raises UserError for one that the file computes in an unknown way."""
        self.used.add(key)
        self.last = key
        value = self.values.get(key)
        if isinstance(value, Unread):
            raise UserError(
                f"{self.source}: {key} = {value.text}, which cannot be read without running it: "
                "write its value there"
            )
        return default if value is None else value

    @contextmanager
    def converting(self) -> Iterator[None]:
        """Raise UserError, naming the key, where a value is not of the expected kind."""
        try:
            yield
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            value = self.values.get(self.last)
            raise UserError(
                f"{self.source}: {self.last or 'a value'} = {value!r:.60} is not of a kind that "
                f"flowrl can read ({error})"
            ) from error

    def ignore(self, *keys: str) -> None:
        """Mark keys that have no meaning for flowrl's results: devices, workers, loggers."""
        self.used |= {key for key in self.values if key.startswith(keys)}

    def left_out(self) -> list[str]:
        rest = [f"{k} = {v!r}" for k, v in self.values.items() if k not in self.used]
        return [f"{text}: no counterpart" for text in rest] + self.notes


def _family(path: str, kind: str = "") -> str:
    name = f"{path} {kind}".lower()
    found = next((family for mark, family in FAMILIES.items() if mark in name), None)
    if found is None or any(mark in name for mark in OTHERS):
        raise UserError(
            f"the pipeline is {path}, but flowrl has SD3, FLUX.1 and SANA: a recipe for another "
            "model cannot be imported"
        )
    return found


def _rewards(asked: Sequence[tuple[str, float]], notes: list[str]) -> list[Tree]:
    """Return the rewards of names and weights; two of one name get labels."""
    found: list[Tree] = []
    for name, weight in asked:
        own = REWARDS.get(name.lower().replace("_score", "score").replace("pick_", "pick"))
        if own is None:
            notes.append(
                f"reward {name} (weight {weight:g}): no counterpart: serve it, or leave it"
            )
            continue
        same = sum(one["name"] == own["name"] for one in found)
        label = {"label": f"{own['name']}_{same + 1}"} if same else {}
        found.append(own | label | ({"weight": float(weight)} if weight != 1 else {}))
        if own["name"] == "geneval":
            notes.append(
                "reward geneval: theirs asks a server with mmdet's detector; flowrl's own is "
                "another training run of the same network"
            )
    if not found:
        known = ", ".join(REWARDS)
        names = ", ".join(name for name, _ in asked) or "(there are none)"
        raise UserError(f"none of the rewards {names} has a counterpart, of {known}")
    return found


def _sized(resolution: Any) -> Tree:
    sizes = resolution if isinstance(resolution, list | tuple) else [resolution]
    height, width = sizes if len(sizes) == 2 else (*sizes, *sizes)
    return {"height": int(height), "width": int(width)}


# --- flow_grpo ----------------------------------------------------------------------------------


def _of_flow_grpo(source: str, values: Tree, notes: list[str], gpus: int | None) -> Imported:
    s = _Source(source=source, values=values, notes=notes)
    algorithm = s.take("train.algorithm", "grpo")
    if algorithm != "grpo":
        raise UserError(
            f"{source}: train.algorithm is {algorithm}, and grpo is what can be imported: choose "
            "an objective of docs/objectives.md yourself"
        )
    with s.converting():
        return _flow_grpo_recipe(s, gpus)


def _flow_grpo_recipe(s: _Source, gpus: int | None) -> Imported:
    path, dataset = s.take("pretrained.model", ""), s.take("dataset", "")
    precision = _dtype(s.take("mixed_precision", "fp16"), s.notes)
    pipeline: Tree = {"path": path, "backbone": _family(path), "dtype": precision}
    pipeline |= {"max_sequence_length": 128} | _sized(s.take("resolution", 512))
    if (revision := s.take("pretrained.revision", "main")) != "main":
        pipeline["revision"] = revision
    start = s.take("train.lora_path")
    recipe: Tree = {
        "pipeline": pipeline,
        "lora": {"rank": 32, "alpha": 64} | ({"init_from": start} if start else {}),
        "prompts": {"train": dataset},
        "rollout": _flow_grpo_rollout(s, gpus),
        "objective": _flow_grpo_objective(s),
        "optim": _flow_grpo_optim(s),
        "rewards": _rewards(list(s.take("reward_fn", {}).items()), s.notes),
        "evaluation": {
            "prompts": dataset,
            "every": s.take("eval_freq", 20),
            "num_inference_steps": s.take("sample.eval_num_steps", 40),
            "guidance_scale": float(s.take("sample.guidance_scale", 4.5)),
            "batch_size": s.take("sample.test_batch_size", 16),
        },
        "run": {
            "seed": s.take("seed", 42),
            "checkpoint_every": s.take("save_freq", 20),
            "keep_checkpoints": s.take("num_checkpoint_limit", 5),
            "output_dir": s.take("save_dir") or "runs/imported",
        },
    }
    if s.take("train.ema", False):
        recipe["ema"] = {"decay": 0.9}
        s.notes.append("EMA: theirs moves every 8 updates, flowrl's at every update")
    s.ignore("logdir", "run_name", "allow_tf32", "use_lora", "prompt_fn", "train.use_8bit_adam")
    s.ignore("per_prompt_stat_tracking", "train.num_inner_epochs", "sample.batch_size", "train.cfg")
    s.notes += [
        "text tokens 128, LoRA of rank 32 and alpha 64 on the attention: constants of their code",
        "epochs: theirs run until they are stopped; run.iterations is flowrl's default",
    ]
    return Imported(source=s.source, recipe=recipe, left_out=s.left_out())


def _flow_grpo_rollout(s: _Source, gpus: int | None) -> Tree:
    given = s.take("gpu_number") or gpus
    if given is None:
        s.notes.append("number of GPUs: not in the file, 1 was taken; --gpus says it")
    batch = s.take("sample.train_batch_size", 1)
    images = (given or 1) * batch * s.take("sample.num_batches_per_epoch", 1)
    group_size = s.take("sample.num_image_per_prompt", 1)
    prompts = images / group_size
    return {
        "prompts_per_iteration": max(1, round(prompts)),
        "group_size": group_size,
        "num_inference_steps": s.take("sample.num_steps", 40),
        "guidance_scale": float(s.take("sample.guidance_scale", 4.5)),
        "noise_level": float(s.take("sample.noise_level", 0.7)),
        "batch_size": batch,
        "tree": _flow_grpo_tree(s),
    }


def _flow_grpo_objective(s: _Source) -> Tree:
    if s.values.get("train.timestep_fraction") in (1.0, 0.99):  # 0.99: all but the last step
        s.used.add("train.timestep_fraction")
    credit = _scale(s.take("sample.global_std", True))
    return {
        "kind": "grpo",
        "clip_nats": None,
        "clip_eps": float(s.take("train.clip_range", 1e-4)),
        "kl_coef": float(s.take("train.beta", 0.0)),
        "kl_form": "latent_no_dt",
        "credit": credit | {"clip": float(s.take("train.adv_clip_max", 5))},
    }


def _flow_grpo_optim(s: _Source) -> Tree:
    batches = s.take("sample.num_batches_per_epoch", 1)
    updates = batches / s.take("train.gradient_accumulation_steps", 1)
    return {
        "lr": float(s.take("train.learning_rate", 3e-4)),
        "betas": [s.take("train.adam_beta1", 0.9), s.take("train.adam_beta2", 0.999)],
        "weight_decay": s.take("train.adam_weight_decay", 1e-4),
        "max_grad_norm": float(s.take("train.max_grad_norm", 1.0)),
        "updates_per_rollout": max(1, round(updates)),
        "micro_batch": s.take("train.batch_size", 1),
    }


def _flow_grpo_tree(s: _Source) -> Tree:
    """Return the tree: noise in all steps, or in a window (the fast versions)."""
    size = s.take("sample.sde_window_size") or s.take("sample.num_sde_steps")
    if not size:
        return {"kind": "flow_grpo"}
    window: Tree = {"kind": "random", "size": int(size)}
    between = s.take("sample.sde_window_range")
    if isinstance(between, list | tuple):
        window |= {"start": int(between[0]), "stop": int(between[1])}
    return {"kind": "flow_grpo_fast", "window": window}


def _dtype(precision: str, notes: list[str]) -> str:
    found = {"fp16": "fp16", "bf16": "bf16", "no": "fp32"}.get(str(precision))
    if found is None:
        raise UserError(f"mixed_precision is {precision!r}, expected fp16, bf16 or no")
    if precision == "no":
        notes.append("mixed_precision no: their code still computes in bf16; here it is fp32")
    return found


def _scale(everywhere: bool) -> Tree:
    return {"scale": "global" if everywhere else "std"}


# --- a config function, read without running it -------------------------------------------------

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "round": round, "max": max}
CALLS |= {"min": min, "str": str}


class _Unreadable(Exception):
    """An expression that would have to be run."""


def _config_of(path: Path, name: str) -> tuple[Tree, list[str]]:
    """Return the values that a config function of a file sets, by dotted key, and statements that
    were not understood."""
    functions = _functions(_parsed(path))
    base = path.with_name("base.py")
    if base.is_file() and base != path:
        own = _functions(_parsed(base))
        functions |= {f"base.{key}": node for key, node in own.items()}
    if name not in functions:
        known = ", ".join(k for k in functions if "." not in k and k != "get_config")
        raise UserError(
            f"{path} has no config {name!r}: name one as {path}:NAME, of {known or 'none there is'}"
        )
    reader = _Reader(functions)
    values = reader.run(name)
    kept = {k: v for k, v in values.items() if not (isinstance(v, dict) and not v)}
    return kept, reader.notes


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a Python file: {error}") from error


def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


class _Reader:
    """Follows assignments of config functions; knows arithmetic and little else."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]):
        self.functions = functions
        self.depth = 0
        self.notes: list[str] = []  # statements that were not understood

    def run(self, name: str) -> Tree:
        """Return what the function leaves under `config`, and its own gpu_number."""
        self.depth += 1
        if self.depth > 20:
            raise UserError(f"the config {name} calls itself")
        local: Tree = {"config": {}, "names": {}}
        for statement in self.functions[name].body:
            self._follow(statement, name, local)
        self.depth -= 1
        return local["config"] | {
            k: v for k, v in local["names"].items() if k in ("gpu_number", "num_gpus")
        }

    def _follow(self, node: ast.stmt, function: str, local: Tree) -> None:
        """Follow an assignment; note every other statement that may change the config."""
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node = ast.Assign(targets=[node.target], value=node.value)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and all(_dotted(t) is not None for t in targets):
            self._assign(node, local)
            return
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        idle = ast.Assert | ast.Import | ast.ImportFrom | ast.Pass | ast.Return
        if not text and not isinstance(node, idle):
            line = " ".join(ast.unparse(node).split())
            self.notes.append(f"{function}: {line:.100}: not understood, set it in the recipe")

    def _assign(self, node: ast.Assign, local: Tree) -> None:
        called = self._called(node.value)
        if called is not None and any(_dotted(t) == "config" for t in node.targets):
            local["config"] = self.run(called)
            return
        targets = [name for target in node.targets if (name := _dotted(target)) is not None]
        section = self._section(node.value, local) if targets[0].isidentifier() else None
        try:
            value = section or self._value(node.value, local)
        except _Unreadable:
            value = Unread(ast.unparse(node.value))
        aliases = [t for t in targets if t.startswith("config.")]
        for target in targets:
            first, _, rest = target.partition(".")
            owner = local["names"].get(first)
            if first == "config" and rest:
                local["config"][rest] = value
            elif isinstance(owner, _Section) and rest:
                local["config"][f"{owner.prefix}{rest}"] = value
            elif rest or (first == "config" and isinstance(value, Unread)):
                self.notes.append(f"{target} = {value!r}: not understood, set it in the recipe")
            elif not rest and isinstance(value, _Section):
                local["names"][target] = value
            elif not rest:  # `config.sample = sample = ConfigDict()`
                section = aliases and isinstance(value, dict) and not value
                prefix = aliases[0].removeprefix("config.") + "." if aliases else ""
                local["names"][target] = _Section(prefix) if section else value

    def _section(self, node: ast.expr, local: Tree) -> "_Section | None":
        """Return the part of the config that an expression names, as `config.sample`."""
        first, _, rest = (_dotted(node) or "").partition(".")
        known = first == "config" and any(
            key.startswith(f"{rest}.") or (key == rest and value == {})
            for key, value in local["config"].items()
        )
        return _Section(f"{rest}.") if rest and known else None

    def _called(self, node: ast.expr) -> str | None:
        """Return the config function that an expression calls."""
        if isinstance(node, ast.Call) and not node.args:
            name = _dotted(node.func) or ""
            return name if name in self.functions else None
        return None

    def _value(self, node: ast.expr, local: Tree) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item, local) for item in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key, local) for key in node.keys if key is not None]
            return dict(zip(keys, (self._value(v, local) for v in node.values), strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand, local)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = self._number(node.left, local), self._number(node.right, local)
            return self._computed(OPERATORS[type(node.op)], left, right)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._part(part, local)) for part in node.values)
        if isinstance(node, ast.Call):
            return self._call(node, local)
        return self._name(node, local)

    def _number(self, node: ast.expr, local: Tree) -> int | float:
        value = self._value(node, local)
        if not isinstance(value, int | float):
            raise _Unreadable
        return value

    def _computed(self, work: Callable[..., Any], *values: Any) -> Any:
        try:
            return work(*values)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise _Unreadable from error

    def _part(self, node: ast.expr, local: Tree) -> Any:
        return self._value(node.value if isinstance(node, ast.FormattedValue) else node, local)

    def _call(self, node: ast.Call, local: Tree) -> Any:
        name = _dotted(node.func) or ""
        if name.endswith("ConfigDict"):
            return {}
        if name == "os.getcwd":
            return ""
        values = [self._value(arg, local) for arg in node.args]
        if name == "os.path.join":
            return "/".join(str(value) for value in values if value)
        if name in CALLS:
            return self._computed(CALLS[name], *values)
        raise _Unreadable

    def _name(self, node: ast.expr, local: Tree) -> Any:
        name = _dotted(node) or ""
        first, _, rest = name.partition(".")
        found = local["config"].get(rest) if first == "config" else local["names"].get(name)
        if found is None or isinstance(found, _Section):
            raise _Unreadable
        return found


@dataclass(frozen=True, slots=True)
class _Section:
    prefix: str  # of the keys under it


def _dotted(node: ast.AST) -> str | None:
    """Return a.b.c for an attribute of names, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


# --- Flow-Factory -------------------------------------------------------------------------------


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_flow_factory(source: str, values: Tree) -> Imported:
    s = _Source(source=source, values=dict(_flat(values)))
    with s.converting():
        return _flow_factory_recipe(s, values)


def _flow_factory_recipe(s: _Source, values: Tree) -> Imported:
    trainer, dataset = s.take("train.trainer_type", "grpo"), s.take("data.dataset_dir", "")
    if s.take("model.finetune_type", "lora") != "lora":
        s.notes.append("model.finetune_type: theirs trains all weights, flowrl a LoRA")
    run: Tree = {
        "seed": s.take("train.seed", 42),
        "checkpoint_every": s.take("log.save_freq", 20) or 50,
        "output_dir": str(s.take("log.run_name") or "runs/imported"),
    }
    if epochs := s.take("train.max_epochs"):
        run["iterations"] = epochs
    checkpointing = bool(s.take("train.enable_gradient_checkpointing", False))
    recipe: Tree = {
        "pipeline": _flow_factory_pipeline(s),
        "lora": _flow_factory_lora(s),
        "memory": {"gradient_checkpointing": checkpointing},
        "prompts": {"train": dataset},
        "rollout": _flow_factory_rollout(s, trainer),
        "objective": _flow_factory_objective(s, trainer),
        "optim": _flow_factory_optim(s),
        "rewards": _flow_factory_rewards(values, s),
        "evaluation": _flow_factory_evaluation(s, dataset),
        "run": run,
    }
    if decay := s.take("train.ema_decay", 0.995):
        recipe["ema"] = {"decay": float(decay)}
        s.notes.append("EMA: theirs moves every train.ema_update_interval epochs on a schedule")
    s.ignore("launcher", "config_file", "num_processes", "main_process", "log.", "rewards")
    s.ignore("data.preprocess", "data.enable_pre", "data.dataloader", "data.force", "data.cache")
    s.ignore("data.sampler_type", "train.ref_param_device", "train.ema_", "scheduler.seed")
    s.ignore("train.adam_epsilon", "train.offload", "model.resume_type", "train.gradient_accum")
    if s.take("eval_rewards"):
        s.notes.append("eval_rewards: add what is not trained on to rewards, with held_out: true")
    s.notes += [
        "text tokens: 256 for SD3.5 and 512 for FLUX.1, constants of their code and of diffusers",
        "log.logging_backend, data workers and caches: flowrl has run.trackers and its own caches",
    ]
    return Imported(source=s.source, recipe=recipe, left_out=s.left_out())


def _flow_factory_pipeline(s: _Source) -> Tree:
    path = s.take("model.model_name_or_path", "")
    own = s.take("train.height"), s.take("train.width")
    size = s.take("train.resolution", 512) if None in own else own
    precision = _dtype(s.take("mixed_precision", "bf16"), s.notes)
    family = _family(path, s.take("model.model_type", ""))
    s.last = "train.resolution"
    return {
        "path": path,
        "backbone": family,
        "dtype": precision,
        "max_sequence_length": 512 if family == "flux" else 256,
    } | _sized(size)


def _flow_factory_lora(s: _Source) -> Tree:
    lora: Tree = {"rank": s.take("model.lora_rank", 8), "alpha": s.take("model.lora_alpha", 16)}
    targets, start = s.take("model.target_modules", "default"), s.take("model.resume_path")
    if isinstance(targets, list):
        lora["targets"] = targets
    return lora | ({"init_from": start} if start else {})


def _flow_factory_rollout(s: _Source, trainer: str) -> Tree:
    return {
        "prompts_per_iteration": s.take("train.unique_sample_num_per_epoch", 8),
        "group_size": s.take("train.group_size", 1),
        "num_inference_steps": s.take("train.num_inference_steps", 10),
        "guidance_scale": float(s.take("train.guidance_scale", 3.5)),
        "batch_size": s.take("train.per_device_batch_size", 1),
    } | _dynamics(s, trainer)


def _flow_factory_optim(s: _Source) -> Tree:
    return {
        "lr": float(s.take("train.learning_rate", 1e-5)),
        "betas": list(s.take("train.adam_betas", [0.9, 0.999])),
        "weight_decay": s.take("train.adam_weight_decay", 1e-4),
        "max_grad_norm": float(s.take("train.max_grad_norm", 1.0)),
        "updates_per_rollout": s.take("train.gradient_step_per_epoch", 2),
        "micro_batch": s.take("train.per_device_batch_size", 1),
    }


def _dynamics(s: _Source, trainer: str) -> Tree:
    """Return kernel, noise and tree."""
    kind = str(s.take("scheduler.dynamics_type", "Flow-SDE"))
    if kind == "ODE" or trainer != "grpo":
        s.ignore("scheduler.")
        return {"tree": {"kind": "ode"}}
    kernels = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
    if kind not in kernels:
        raise UserError(
            f"scheduler.dynamics_type is {kind}, expected {', '.join([*kernels, 'ODE'])}"
        )
    noise = float(s.take("scheduler.noise_level", 0.7))
    number, steps = s.take("scheduler.num_sde_steps"), s.take("scheduler.sde_steps")
    tree: Tree = {"kind": "flow_grpo"}
    if number and steps:
        window = {
            "kind": "random",
            "size": int(number),
            "start": min(steps),
            "stop": max(steps) + 1,
        }
        tree = {"kind": "flow_grpo_fast", "window": window}
        s.notes.append(
            f"scheduler.sde_steps = {steps}: theirs draws {number} of these steps, flowrl a window "
            "of steps side by side among them"
        )
    return {"kernel": kernels[kind], "noise_level": noise, "tree": tree}


def _flow_factory_objective(s: _Source, trainer: str) -> Tree:
    scale, kl = _scale(bool(s.take("train.global_std", True))), float(s.take("train.kl_beta", 0))
    combine = s.take("train.advantage_aggregation", "gdpo")
    limit = s.take("train.adv_clip_range", 5.0)
    scale |= {"clip": float(limit[-1] if isinstance(limit, list) else limit)}
    advantage = scale | ({"rewards": "gdpo"} if combine == "gdpo" else {})
    clip = s.take("train.clip_range", 1e-4)
    clip = float(clip[-1] if isinstance(clip, list) else clip)
    if trainer == "grpo":
        form = "velocity" if s.take("train.kl_type", "x-based") == "v-based" else "latent_dt"
        return {
            "kind": "grpo", "clip_nats": None, "clip_eps": clip, "kl_coef": kl, "kl_form": form,
            "credit": advantage,
        }  # fmt: skip
    s.take("train.kl_type")
    if trainer == "nft":
        mix = float(s.take("train.nft_beta", 1.0))
        s.notes.append("train.nft: times and the old policy's decay are flowrl's own defaults")
        return {"kind": "nft", "nft_mix": mix, "kl_coef": kl, "advantage": advantage}
    if trainer == "awm":
        s.notes.append("train.awm: times and the old policy's decay are flowrl's own defaults")
        return {"kind": "awm", "clip": clip, "kl_coef": kl, "advantage": advantage}
    raise UserError(
        f"train.trainer_type is {trainer}, and grpo, nft and awm are what can be imported: choose "
        "an objective of docs/objectives.md yourself"
    )


def _flow_factory_rewards(values: Tree, s: _Source) -> list[Tree]:
    listed = values.get("rewards") or []
    listed = [listed] if isinstance(listed, dict) else listed
    s.last = "rewards"
    found: list[Tree] = []
    asked: list[tuple[str, float]] = []
    for number, one in enumerate(listed):
        name = one.get("name") or one.get("reward_model") or f"reward_{number + 1}"
        weight = 1.0 if one.get("weight") is None else float(one["weight"])
        if url := one.get("server_url"):
            executor = {"kind": "http", "urls": [url]}
            own: Tree = {"name": str(name), "executor": executor}
            found.append(own | ({"weight": weight} if weight != 1 else {}))
        else:
            asked.append((str(one.get("reward_model") or name), weight))
        s.notes += [
            f"rewards: {name}: {key} = {value!r}: no counterpart"
            for key, value in one.items()
            if key not in KNOWN_OF_REWARD
        ]
    return found + (_rewards(asked, s.notes) if asked or not found else [])


def _flow_factory_evaluation(s: _Source, dataset: str) -> Tree:
    every = s.take("eval.eval_freq", 10)
    own = s.take("eval.height"), s.take("eval.width")
    size = s.take("eval.resolution") if None in own else own
    return (_sized(size) if size else {}) | {
        "prompts": dataset, "every": every, "seed": s.take("eval.seed") or 42,
        "num_inference_steps": s.take("eval.num_inference_steps", 30),
        "guidance_scale": float(s.take("eval.guidance_scale", 3.5)),
        "batch_size": s.take("eval.per_device_batch_size", 1),
    }  # fmt: skip
