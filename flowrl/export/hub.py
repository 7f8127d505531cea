"""Upload the public files of a run to the Hub, without anything that names a machine or a secret.

The token is huggingface_hub's, from HF_TOKEN or `hf auth login`: none is taken as an argument, so
none ends up in a configuration, a card or a shell's history.
"""

import inspect
import logging
import re
import shlex
import tempfile
from ast import literal_eval
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

from flowrl.backbones.families import LICENCES
from flowrl.backbones.loading import is_offline
from flowrl.backbones.lora_files import FILE
from flowrl.config.yaml12 import dump_yaml, load_yaml
from flowrl.errors import UserError, first_line
from flowrl.training.run import Run
from flowrl.utils.untrusted import read_bytes

CARD, CONFIG = "README.md", "config.yaml"
PUBLIC = [FILE, CARD, CONFIG, "card/*.png"]
# The folders in the lines of the card that load the pipeline and the LoRA.
BASE = re.compile(r"""(\.from_pretrained\()('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""")
LOADING = re.compile(
    r"""^(.*\bload_lora\w*\((?:pipe, )?)('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""", re.MULTILINE
)
SECRET = re.compile("key|token|secret|password", re.IGNORECASE)
VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")  # where a secret is, which is none
READER = re.compile(r"(json|csv|parquet|arrow|text|hf):(?=[/~.])", re.IGNORECASE)
HOST = re.compile(r"(\w[\w.-]*[.a-z][\w.-]*|[\d.]{7,}|\[[\da-f:]+\]):\d{2,5}(/.*)?", re.IGNORECASE)
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of a repository
LOG = logging.getLogger(__name__)
TOKEN = "set HF_TOKEN to a token that may write, or log in with hf auth login"


def open_repository(name: str, *, private: bool = False) -> str:
    """Create or find the repository; return its full name, USER/NAME.

    Called before training. Raises UserError for a missing network or token.
    """
    from huggingface_hub import HfApi, get_token

    if is_offline():
        raise UserError(f"cannot push to {name}: HF_HUB_OFFLINE is set; unset it")
    if not get_token():
        raise UserError(f"cannot push to {name}: no token for the Hub; {TOKEN}")
    try:
        api = HfApi()
        created = api.create_repo(name, private=private or None, exist_ok=True, repo_type="model")
        # Creating an existing repository also succeeds with a token that may only read. Older
        # versions of auth_check have no `write`.
        if "write" in inspect.signature(api.auth_check).parameters:
            api.auth_check(created.repo_id, repo_type="model", write=True)
    except Exception as error:  # httpx, requests, OSError and ValueError all have their own
        raise UserError(f"cannot push to {name}: {first_line(error)}; {TOKEN}") from error
    return created.repo_id


def push(folder: Path, repository: str) -> str:
    """Upload the public files of a run's folder to an existing repository; return the address.

    Raises UserError when the upload fails.
    """
    from huggingface_hub import HfApi

    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".upload.", suffix=".tmp") as scratch:
            stage(folder, Path(scratch), repository)
            HfApi().upload_folder(
                repo_id=repository,
                repo_type="model",
                folder_path=scratch,
                allow_patterns=PUBLIC,
                commit_message="LoRA trained with flowrl",
            )
    except Exception as error:  # of the files too: the training behind it shall not be lost
        raise UserError(
            f"the upload to {repository} failed: {first_line(error)}; {folder} is complete, "
            f"{push_later(folder, repository)}"
        ) from error
    return f"https://huggingface.co/{repository}"


def push_later(folder: Path, repository: str) -> str:
    """Return the command that uploads the run, as part of a sentence."""
    words = ["flowrl", "export", str(folder), "--to", "hub", "--repo-id", repository]
    return f"push it later with {shlex.join(words)}"


def stage(folder: Path, to: Path, repository: str) -> None:
    """Copy the public files, texts without private parts."""
    for path in {path for pattern in PUBLIC for path in folder.glob(pattern) if path.is_file()}:
        name = path.relative_to(folder).as_posix()
        data = read_bytes(path, inside=folder, limit=None)
        if name == CARD:
            data = public_card(data.decode(), repository).encode()
        if name == CONFIG:
            data = public_config(data.decode()).encode()
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(data)


def public_card(text: str, repository: str) -> str:
    """Return the card with the repository in place of the LoRA's folder, and the base's name."""
    with suppress(SyntaxError, ValueError):  # a card that somebody edited stays as it is
        text = BASE.sub(lambda match: f"{match[1]}{public(literal_eval(match[2]))!r}", text)
    return LOADING.sub(lambda match: f"{match[1]}{repository!r}", text)


def public_config(text: str) -> str:
    """Return a configuration without private parts (see `public`), and that pushes nowhere."""
    values = public(load_yaml(text, CONFIG))
    if isinstance(values.get("run"), dict):
        values["run"] |= {"push_to_hub": False, "hub_model_id": None}
    return dump_yaml(values)


def public(value: Any) -> Any:
    """Return nested values without names of machines or users, and without secrets.

    An absolute or climbing path becomes its last part, a server's address a placeholder, and the
    value of a key such as api_key None.
    """
    if isinstance(value, dict):
        return {k: None if _is_secret(k, item) else public(item) for k, item in value.items()}
    if isinstance(value, list):
        return [public(item) for item in value]
    return _public_text(value) if isinstance(value, str) else value


def _is_secret(key: Any, value: Any) -> bool:
    # Numbers (max_tokens) and names of variables (api_key_env) are no secrets.
    if not SECRET.search(str(key)) or value is None or isinstance(value, (bool, int, float)):
        return False
    named = str(key).endswith("_env") and isinstance(value, str)
    return not (named and VARIABLE.fullmatch(value))


def _public_text(text: str) -> str:
    if "://" in text:
        return text if text.startswith("https://huggingface.co/") else "http://HOST:PORT"
    if HOST.fullmatch(text):
        return "HOST:PORT"
    # Of FILE.py:NAME too, as rewards are named.
    reader = READER.match(text)  # as in hf:/folder of a set of prompts
    start, path = (reader[0], text[reader.end() :]) if reader else ("", text)
    climbs = ".." in re.split(r"[\\/]", path)
    if climbs or path.startswith(("/", "~")) or PureWindowsPath(path).is_absolute():
        return start + PureWindowsPath(path).name
    return text


def publish(run: Run, repository: str | None) -> None:
    """Upload a finished run. All processes call it, the main one with a repository.

    Errors are logged: the run can be pushed later. A run that was interrupted (not evaluated) or
    ended by its stop rule (an earlier checkpoint is better) is not uploaded.
    """
    interrupted = run.interrupted  # a collective of all processes
    if repository is None:
        return
    ended = "was interrupted" if interrupted else "was ended by run.on_hacking"
    if interrupted or (run.stopped and not run.out_of_time):
        LOG.warning("the run %s and is not uploaded; %s", ended, push_later(run.folder, repository))
        return
    try:
        LOG.info("uploaded to %s", push(run.folder, repository))
    except UserError as error:
        LOG.warning("%s", error)


# --- the licence of the base model, which its LoRA inherits --------------------------------------


def licence_of(base_model: str) -> dict[str, str]:
    """Return a licence's entries in a card's header by a pipeline's name; {} for an unknown one."""
    for start, name, file in LICENCES:
        if base_model.startswith(start):
            if not file:
                return {"license": name}
            link = f"https://huggingface.co/{base_model}/blob/main/{file}"
            return {"license": "other", "license_name": name, "license_link": link}
    return {}
