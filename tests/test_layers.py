"""The shape of the code: who may import whom, and what text must not hold."""

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flowrl"

# Each line may import itself and the lines above it. The unit is a package of `flowrl`, or one of
# the few modules beside the packages.
LAYERS = [
    {"errors", "utils", "functional", "tiny"},
    {"prompts", "trees", "trajectory"},
    {"config"},
    {"backbones"},
    {"quantization"},
    {"scoring"},
    {"sampling", "objectives"},
    {"training", "offline"},
    {"assembly"},
    {"export", "planning"},
    {"evaluation", "web"},
    {"api", "testing"},
    {"voting"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
STRANGERS = [{"sampling", "objectives"}]  # packages of one line that do not import each other
HEAVY = {
    "accelerate", "cv2", "datasets", "diffusers", "fastapi", "onnxruntime", "open_clip",
    "peft", "playwright", "rapidocr", "ray", "scipy", "skimage", "tensorboard", "trackio",
    "transformers", "uvicorn", "wandb", "xformers",
}  # fmt: skip


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module(path: Path) -> str:
    """flowrl/functional/sde.py -> functional.sde; the package's own __init__ is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, with the names that may themselves be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: they read the same everywhere"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


SOURCES = {module(path): path.read_text() for path in sources("flowrl")}
MODULES = {name: ast.parse(text) for name, text in SOURCES.items()}


class _NoBuild(ast.NodeTransformer):
    """Drop functions named `build`: an option may import what it makes, also as a type."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name == "build" else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


@functools.cache
def targets(name: str) -> frozenset[str]:
    """The modules of this package that one of them imports, inside functions too."""
    found = set()
    for target in imports(_NoBuild().visit(ast.parse(SOURCES[name]))):
        if target.startswith("flowrl."):
            inner = target.removeprefix("flowrl.")
            found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return frozenset(found - {name, ""})


def top(name: str) -> str:
    return name.partition(".")[0]


def test_a_package_imports_only_its_own_line_and_those_above():
    for name in MODULES:
        if not name:
            continue
        assert top(name) in LEVEL, f"{top(name)} has no place in LAYERS"
        below = {t for t in targets(name) if LEVEL[top(t)] > LEVEL[top(name)]}
        assert not below, f"flowrl.{name} may not import {sorted(below)}"
        for pair in STRANGERS:
            others = pair - {top(name)} if top(name) in pair else set()
            assert not {t for t in targets(name) if top(t) in others}, name


def test_imports_have_no_cycle():
    order = list(
        TopologicalSorter({name: targets(name) for name in MODULES if name}).static_order()
    )
    assert set(order) >= set(MODULES) - {""}


def test_only_distributed_imports_accelerate():
    users = {
        n for n, tree in MODULES.items() if any(i.startswith("accelerate") for i in imports(tree))
    }
    assert users <= {"utils.distributed"}


def test_heavy_packages_are_imported_where_they_are_used():
    for name, tree in MODULES.items():
        first = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        found = {top(i) for node in first for i in imports(node)} & HEAVY
        assert not found, f"flowrl.{name} loads {sorted(found)} when imported"


def test_rewards_and_flowrl_do_not_know_each_other():
    for path in sources("rewards"):  # which import each other by relative names
        tree = ast.parse(path.read_text())
        own = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        found = {i for n in own if not getattr(n, "level", 0) for i in imports(n)}
        assert not {i for i in found if i.startswith(("flowrl", "rewards"))}, path
    for name, tree in MODULES.items():
        assert not {i for i in imports(tree) if i.startswith(("flowrl_rewards", "rewards"))}, name


# Plain data that is itself what an option says, and the bases of some of it.
DATA = {"Config", "NoiseCoupling", "DepthPruning", "AllSteps", "FixedWindow", "RandomWindow"}
DATA |= {"ProgressiveWindow", "GeometricWindow", "LookAhead", "_Window", "Options"}


def test_one_name_is_one_class_and_options_are_called_so():
    defined: dict[str, str] = {}
    bases: dict[str, set[str]] = {}
    for path in sources("flowrl", "rewards"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where = str(path.relative_to(ROOT))
                if not node.name.startswith("_"):
                    assert node.name not in defined, (
                        f"{defined[node.name]} and {where}: {node.name}"
                    )
                    defined[node.name] = where
                bases[node.name] = {ast.unparse(base) for base in node.bases}
    options = {"Options"}
    while more := {name for name, own in bases.items() if own & options} - options:
        options |= more
    wrong = {name for name in options - DATA if not name.endswith("Options")}
    assert not wrong, f"options end in Options: {sorted(wrong)}"


TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cff", ".j2", ".jsonl", ".csv", ".html"}
PUBLIC = {
    "arxiv.org", "doi.org", "example.com", "example.org", "github.com", "huggingface.co",
    "www.apache.org", "www.w3.org", "colab.research.google.com", "127.0.0.1",
    "localhost", "host", "download.pytorch.org",
}  # fmt: skip
PRIVATE = [
    re.compile(r"(?<![\w.~$}])/(?:home|mnt|root|tmp|work|Users)/\w"),
    # 192.0.2.* is for documentation (RFC 5737): nobody has it.
    re.compile(
        r"\b(?!(?:127\.0\.0\.1|0\.0\.0\.0|192\.0\.2\.\d+)\b)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b"
    ),
    re.compile(r"index[-_]url(?! \S+download[.]pytorch[.]org/)|\bpypi[.]org|\+cu\d"),
]
PICTURE = re.compile(r"data:image/\w+;base64,[\w+/=]+")  # says nothing, whatever its letters
URL = re.compile(r"[a-z]+://(?:[^/@\s]*@)?([a-zA-Z0-9][a-zA-Z0-9.-]*)")


def texts() -> Iterator[Path]:
    folders = ("flowrl", "rewards", "configs", "scripts", "examples", "tests", "docs", "gallery")
    for folder in (*folders, ".ci"):
        yield from (p for p in (ROOT / folder).rglob("*") if p.suffix in TEXT and p.is_file())
    yield from (p for p in ROOT.iterdir() if p.suffix in TEXT or p.name == "LICENSE")
    yield ROOT / ".ci" / "run"


def test_text_names_no_machine_and_no_private_address():
    for path in texts():
        if any(part.startswith("venv") for part in path.parts):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = PICTURE.sub("", line)
            where = f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]}"
            assert not any(pattern.search(line) for pattern in PRIVATE), where
            assert {host.lower() for host in URL.findall(line)} <= PUBLIC, where


def test_no_test_lies_in_a_folder_that_pytest_skips(pytestconfig):
    skipped = pytestconfig.getini("norecursedirs")
    for path in (ROOT / "tests").rglob("test_*.py"):
        folders = path.relative_to(ROOT).parts[:-1]
        assert not any(fnmatch(f, pattern) for f in folders for pattern in skipped), path
