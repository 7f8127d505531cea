"""The site's pages that are made from code, and links that leave docs/: a hook of mkdocs.yml.

    pip install ".[docs]" && mkdocs serve

Pages: one of each section of options, the commands, the Python interface, the examples, and from
beside docs/ the README (as the first page), CHANGELOG, CONTRIBUTING and the gallery. A link to
a file without a page leads to the repository where `FLOWRL_REPOSITORY` names its address, to Colab
for a notebook on GitHub, and is plain text elsewhere.
"""

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import flowrl
from flowrl import api
from flowrl.cli import app
from flowrl.config import Config
from flowrl.config.explain import default_text
from flowrl.config.messages import Option, walk

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
EXAMPLES = ("examples/grpo_from_scratch.py",)
SHOWN = (".md", ".png", ".html")  # files of the gallery that the site has
LINK = re.compile(r"(\]\(|\b(?:src|href)=\")([^)\s\"#]*)(#[^)\s\"]*)?(\)|\")")
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # names that tests give to code: ```python plan
TEXT_LINK = re.compile(r"\[([^\]]+)\]\(REPOSITORY:[^)]*\)")

_pages: dict[str, str] = {}  # file of the repository -> file of the site
_origins: dict[str, str] = {}  # and back


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    _pages.clear()
    for file in list(files):
        if file.src_uri == "README.md":  # the list of pages, which the navigation shows
            files.remove(file)
        else:
            _pages[f"docs/{file.src_uri}"] = file.src_uri
    for source, target in _files_beside():
        path = ROOT / source
        text = path.suffix == ".md"
        content: dict[str, Any] = (
            {"content": path.read_text(encoding="utf-8")} if text else {"abs_src_path": str(path)}
        )
        files.append(File.generated(config, target, **content))
        _pages[source] = target
    for source in EXAMPLES:
        target = f"{source.removesuffix('.py')}.md"
        code = (ROOT / source).read_text(encoding="utf-8")
        text = f"# {Path(source).name}\n\n```python\n{code}```\n"
        files.append(File.generated(config, target, content=text))
        _pages[source] = target
    for target, text in reference():
        files.append(File.generated(config, target, content=text))
    _pages["docs/README.md"] = "index.md"
    _origins.update(
        {target: source for source, target in _pages.items() if source != "docs/README.md"}
    )
    return files


def _files_beside() -> Iterator[tuple[str, str]]:
    yield from BESIDE.items()
    for path in sorted((ROOT / "gallery").rglob("*")):
        if path.is_file() and path.suffix in SHOWN:
            name = path.relative_to(ROOT).as_posix()
            yield name, name.replace("README.md", "index.md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's own files, and others at the repository."""
    origin = _origins.get(page.file.src_uri)
    if origin is None:
        return markdown
    here, at = posixpath.dirname(origin), posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        if not target or ":" in target or target.startswith("/"):
            return match[0]
        source = posixpath.normpath(posixpath.join(here, target))
        source = f"{source}/README.md" if (ROOT / source / "README.md").is_file() else source
        if source in _pages:
            return start + posixpath.relpath(_pages[source], at or ".") + (anchor or "") + end
        if config.repo_url:
            address = config.repo_url.rstrip("/")
            if source.endswith(".ipynb"):
                address = address.replace("//github.com/", "//colab.research.google.com/github/")
            return f"{start}{address}/blob/main/{source}{end}"
        return f"{start}REPOSITORY:{source}{end}"

    markdown = FENCE.sub(r"\1", markdown)
    return TEXT_LINK.sub(r"\1", LINK.sub(moved, markdown))


# --- pages made from code ------------------------------------------------------------------------


def reference() -> Iterator[tuple[str, str]]:
    """Yield (file, Markdown) of every page of the reference that is made from code."""
    for section, found in option_sections().items():
        yield f"reference/options/{section}.md", _options_page(section, found)
    yield "reference/commands.md", _commands_page()
    yield "reference/python.md", _python_page()


def option_sections() -> dict[str, list[Option]]:
    """Return the options of every section, one for each kind that has it."""
    found: dict[str, dict[tuple[str, str], Option]] = {}
    for option in walk(Config):
        section = option.path.partition(".")[0]
        found.setdefault(section, {})[option.path, option.variant] = option
    return {section: list(options.values()) for section, options in found.items()}


def _options_page(section: str, found: list[Option]) -> str:
    first, *options = found
    lines = [f"# {section}", "", _plain(first.meaning), ""]
    for option in options:
        kind = f" ({option.variant})" if option.variant else ""
        lines += [f"## `{option.path}`{kind}", "", _plain(option.meaning), ""]
        lines += [f"- takes {_plain(option.expected)}", f"- default `{default_text(option)}`"]
        lines += [f"- source: {_plain(option.source)}"] if option.source else []
        lines.append("")
    return "\n".join(lines)


def commands(group: Any = None, name: str = "flowrl") -> Iterator[tuple[str, Any]]:
    """Yield every command of the program with its whole name."""
    found = group or typer.main.get_command(app)
    inner = getattr(found, "commands", None)
    if inner is None:
        yield name, found
        return
    for key, command in inner.items():
        yield from commands(command, f"{name} {key}")


def _commands_page() -> str:
    lines = ["# Commands", "", "Every command also says this with `--help`.", ""]
    for name, command in commands():
        lines += [f"## `{name}`", "", *_help_lines(command.help or ""), ""]
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _help_lines(text: str) -> Iterator[str]:
    """Yield a command's help, its examples as code."""
    paragraphs, _, examples = inspect.cleandoc(text).replace("\f", "").partition("Examples:")
    yield _plain(paragraphs)
    shown = [line.strip() for line in examples.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(shown) if line.startswith("flowrl")]
    if starts:
        code, rest = [], []
        for line in shown:
            (
                code if line.startswith(("flowrl", "--", "\\")) or line.endswith("\\") else rest
            ).append(line)
        yield from ["```bash", *code, "```", "", _plain(" ".join(rest))]


def _parameter(parameter: Any) -> str:
    """Return a row of a command's table. Typer's own classes: what they share with click's."""
    named = parameter.opts[0].startswith("-")
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    metavar = parameter.metavar or ("" if named else str(parameter.name).upper())
    shown = " ".join(filter(None, [words if named else "", metavar]))
    return f"| `{_cell(shown)}` | {_cell(_plain(parameter.help or ''))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def public_names() -> list[str]:
    """Return the dotted names of the Python interface: flowrl's own, then those of flowrl.api."""
    own_functions = inspect.getmembers(api, inspect.isfunction)
    functions = [
        name
        for name, value in own_functions
        if value.__module__ == api.__name__ and not name.startswith("_")
    ]
    own = [f"flowrl.{name}" for name in flowrl.__all__ if not name.startswith("_")]
    return [*own, *(f"flowrl.api.{name}" for name in functions if f"flowrl.{name}" not in own)]


def _python_page() -> str:
    lines = [
        "# Python",
        "",
        "`flowrl` has these names; `flowrl.api` a function for each command.",
        "",
    ]
    for name in public_names():
        lines += [
            f"## `{name}`",
            "",
            f"::: {_home(name)}",
            "    options: {show_root_heading: false}",
            "",
        ]
    return "\n".join(lines)


def _home(name: str) -> str:
    """Return where an object is defined, which is where its documentation is."""
    found = getattr(flowrl if name.count(".") == 1 else api, name.rpartition(".")[2])
    return f"{found.__module__}.{found.__qualname__}"


def _plain(text: str) -> str:
    """Return a text of the code as Markdown: words such as <name> are no HTML."""
    return text.replace("<", "&lt;").replace("[", "\\[")
