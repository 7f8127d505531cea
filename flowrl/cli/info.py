"""`flowrl explain` and `flowrl doctor`: commands that tell and change nothing."""

from typing import Annotated

import typer

from flowrl.errors import UserError


def explain(
    key: Annotated[str, typer.Argument(help="An option or section; none lists the sections.")] = "",
) -> None:
    """Say what an option means, what it takes, its default and where that comes from.

    Examples:

      flowrl explain rollout.noise_level

      flowrl explain rollout
    """
    from flowrl.config.explain import explain as text

    typer.echo(text(key))


def doctor() -> None:
    """Check versions, device and optional packages; say how to get what is missing.

    Reaches no network. Exits with 1 if something that a run needs is missing.
    """
    from flowrl.cli._console import print_findings
    from flowrl.cli.doctor import examine, healthy

    findings = examine()
    print_findings(findings, max(len(finding.topic) for finding in findings))
    if not healthy(findings):
        raise UserError(
            "Something that a run needs is missing; the lines marked !! say what to do."
        )
