"""The Hub's side of a run: the repository before it, the upload after it."""

import logging
from pathlib import Path

from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.hub import open_repository, push, push_later
from flowrl.run import Run

LOG = logging.getLogger(__name__)


def repository_of(config: Config) -> str | None:
    """Where the run is pushed at its end, made or found now; None where it is not.

    Raises UserError when nothing could be pushed, before anything is loaded or drawn.
    """
    if not config.run.push_to_hub:
        return None
    name = config.run.hub_model_id or Path(config.run.output_dir).resolve().name
    return open_repository(name, private=config.run.hub_private)


def publish(config: Config, run: Run, repository: str | None) -> None:
    """Upload what the run has for everybody; all processes call it, the main one does it.

    What goes wrong is told and not raised: the run is whole, and can be pushed later. So is one
    that was interrupted, whose weights nobody has looked at.
    """
    if not config.run.push_to_hub:
        return
    interrupted = run.interrupted
    if repository is None:  # not the main process
        return
    if interrupted:
        later = push_later(run.folder, repository)
        LOG.warning("the run was interrupted and is not uploaded; %s", later)
        return
    try:
        LOG.info("uploaded to %s", push(run.folder, repository))
    except UserError as error:
        LOG.warning("%s", error)
