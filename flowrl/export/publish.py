"""The end of a run that goes to the Hub."""

import logging

from flowrl.errors import UserError
from flowrl.export.hub import push, push_later
from flowrl.training.run import Run

LOG = logging.getLogger(__name__)


def publish(run: Run, repository: str | None) -> None:
    """Upload what the run has for everybody; all processes call it, one with a repository.

    What goes wrong is told and not raised: the run is whole, and can be pushed later. So can one
    that was interrupted, whose weights nobody has looked at, or that its stop rule has ended,
    whose best weights are those of an earlier checkpoint.
    """
    interrupted = run.interrupted  # which all processes ask together
    if repository is None:
        return
    ended = "was interrupted" if interrupted else "was ended by run.stop_when_hacking"
    if interrupted or run.stopped:
        LOG.warning("the run %s and is not uploaded; %s", ended, push_later(run.folder, repository))
        return
    try:
        LOG.info("uploaded to %s", push(run.folder, repository))
    except UserError as error:
        LOG.warning("%s", error)
