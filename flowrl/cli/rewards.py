"""`flowrl reward-check` and `reward-serve`: try rewards, and serve them over HTTP."""

from typing import Annotated

import typer

from flowrl.cli._console import (
    AsJson,
    arguments_of,
    mapping_of,
    print_checks,
    print_table,
    say,
    starting,
)
from flowrl.errors import UserError


def reward_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Built-in, or your own as module:attribute."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every built-in reward.")] = False,
    args: Annotated[
        str | None, typer.Option(metavar="YAML", help="Its arguments, as in '{mode: strict}'.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Check which of your prompts the reward can score."),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="FILE|hf:NAME", help="Pairs of images, ranked by people.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="YAML", help="Columns of --pairs, as in flowrl collect.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try rewards on images of known order: the right word must score above the wrong one.

    Scores must be finite, within the reward's bounds, and the same for an image alone and in a
    batch. Training does the same before its first step.

    --pairs measures the share of pairs that the reward ranks as people did, ties counted half, and
    its 95 % interval. ?? says that it is not better than chance, !! that it is worse.

    ok works, !! does not, ?? gave all images the same score, -- cannot run here: a package,
    weights or a server is missing. Exits with 1 after a !!, and after a -- of a reward that was
    named.

    Examples:

      flowrl reward-check ocr geneval

      flowrl reward-check ocr --args '{mode: strict}'

      flowrl reward-check my_rewards:sharpness --prompts prompts.jsonl

      flowrl reward-check pickscore clipscore --pairs pairs.jsonl

      flowrl reward-check --all
    """
    chosen = _chosen(names or [], everything=everything, single=bool(args))
    with starting():
        from flowrl.evaluation.agreement import measure_agreement
        from flowrl.offline.pairs import read_pairs
        from flowrl.prompts.records import load_prompts
        from flowrl.scoring.check import check_named
        from flowrl.scoring.spec import RewardSpec, load_reward

    arguments = arguments_of(chosen, [args] if args is not None else None)
    records = load_prompts(prompts) if prompts else []
    mapping = mapping_of(columns, "--columns")
    if columns and not pairs:
        raise UserError("--columns are of --pairs: give both, or leave --columns out.")
    judged, left_out = read_pairs(pairs, mapping) if pairs else ([], [])
    if left_out:
        say(f"{len(left_out)} rows left out, the first: {left_out[0]}", err=True)
    states = {}
    for name, options in zip(chosen, arguments, strict=True):
        results = check_named(name, options, prompts=records)
        if judged and all(result.state in ("ok", "warning") for result in results):
            spec = RewardSpec(name=name, reward=load_reward(name, options))
            results.append(measure_agreement(spec, judged).result(name))
        states[name] = {result.state for result in results}
        if as_json:
            fields = ("state", "detail", "remedy")
            rows = [{"reward": name} | {f: getattr(r, f) for f in fields} for r in results]
            print_table(rows, as_json=True)
        else:
            print_checks(results, max(map(len, chosen)))
    if wrong := [name for name, its in states.items() if "problem" in its]:
        raise UserError(f"These rewards do not work, lines marked !! say why: {', '.join(wrong)}.")
    missing = [name for name, its in states.items() if "missing" in its]
    if missing and not everything:
        raise UserError(f"Could not be tried, lines marked -- say why: {', '.join(missing)}.")


def _chosen(names: list[str], *, everything: bool, single: bool) -> list[str]:
    from flowrl.scoring.spec import BUILT_IN

    if everything == bool(names):
        raise UserError(
            "Give the names of rewards, or --all for every built-in one: "
            f"{', '.join(BUILT_IN)}; your own is module:attribute."
        )
    if single and len(names) != 1:
        raise UserError("--args are of one reward: give one name with them.")
    return names or list(BUILT_IN)


def reward_serve(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Built-in, or your own as module:attribute."),
    ],
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="YAML", help="Arguments, as in '{mode: strict}'; one for each NAME."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the token to require.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, metavar="MB", help="Largest request.")] = 80,
) -> None:
    """Serve rewards over HTTP, to runs with executor: {kind: http, urls: [...]}.

    Each that has fixtures is checked before the address is printed. Listens on this
    machine alone; --host with another address needs --token-env. Stop with Ctrl-C.

    Examples:

      flowrl reward-serve ocr geneval

      flowrl reward-serve ocr --args '{mode: strict}' --port 8401

      flowrl reward-serve my_rewards:sharpness --host rewards.example.com --token-env REWARD_TOKEN
    """
    arguments = arguments_of(names, args)
    with starting():
        from flowrl.scoring.server import background_spec, make_app, warm_up
        from flowrl.scoring.spec import load_reward
        from flowrl.utils.serving import (
            address_of,
            listen,
            local_names,
            make_server,
            read_token,
        )

    token = read_token(host, token_env)
    if port:
        listen(host, port).close()  # a port that is taken is refused before anything is loaded
    pairs = zip(names, arguments, strict=True)
    specs = [background_spec(name, load_reward(name, values)) for name, values in pairs]
    try:
        hosts = None if token else local_names(host)
        app = make_app(specs, hosts=hosts, token=token, max_body=max_body * 2**20)
        late = [spec.name for spec in specs if not warm_up(spec)]
        # Only now, so that clients turn to other servers until this one can answer.
        listening = listen(host, port)
    except BaseException:
        for spec in specs:
            spec.get_executor().close()
        raise
    with listening:
        # Flushed: programs that read this through a pipe wait for it.
        print(f"serving {', '.join(names)} at {address_of(host, listening)}", flush=True)
        if late:
            print(f"not tried yet, loads at the first request: {', '.join(late)}", flush=True)
        make_server(app, shutdown_timeout=5).run(sockets=[listening])
