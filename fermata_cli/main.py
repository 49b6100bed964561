"""The `fermata` command: what it is called with, and how it ends.

Invariants: stdout is data, stderr is talk; every end has a documented exit code, and a failure is one sentence, never a
traceback. Commands import what they need when they run, so `fermata --help` stays quick.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from node_runtime.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, NodeError

EXIT_CODES = """\
Exit codes: 0 all is well; 1 what was checked does not hold (a tool that failed, a case that missed); 2 settings,
arguments or files are wrong; 3 a peer is down or a port is in use; 4 it could not go on; 130 Ctrl-C.
"""

# typer brings its own copy of click or uses the library, by version: this is the ClickException of either.
_WRONG_USE = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="fermata",
    help="Train language models that use tools: generation is held at a tool call and goes on by itself.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
tools_app = typer.Typer(help="Call tools through a gateway, and see what it serves.", no_args_is_help=True)
config_app = typer.Typer(help="Settings as the processes would read them.", no_args_is_help=True)
turn_app = typer.Typer(help="The parser and validator of model turns.", no_args_is_help=True)
app.add_typer(tools_app, name="tools")
app.add_typer(config_app, name="config")
app.add_typer(turn_app, name="turn")

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key, section.key=value; repeatable.")
]
Gateway = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="ADDR",
        help="host:port of a tool gateway; else that of rollout.gateway in the settings, else 127.0.0.1:7000.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of task order, sampling and probes.")] = 0,
    name: Annotated[str, typer.Option(help="The run: results go to RUNS/NAME, what stood there is replaced.")] = "demo",
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    steps: Annotated[int | None, typer.Option(min=0, help="Training steps (default: as in the demo's file).")] = None,
    rollout_nodes: Annotated[int | None, typer.Option(min=1, max=2, help="Rollout nodes, each with an engine.")] = None,
    slow_share: Annotated[float | None, typer.Option(min=0, max=1, help="Share of tool calls made slow.")] = None,
    slow_seconds: Annotated[
        tuple[float, float] | None, typer.Option(help="Shortest and longest time a slow call is held.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, even on a terminal.")] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Leave the cluster up after the run, until Ctrl-C.")] = False,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="Mutual TLS and a token on all gRPC, with throw-away certificates; weights travel in clear."
        ),
    ] = False,
) -> None:
    """Train the demo model on a local cluster: gateway, tool backends, rollout node and trainer as processes.

    Leaves RUNS/NAME with summary.json, learning_curve.png, timeline.png, the trained model, spans and logs.
    """
    from fermata_cli.commands.demo import DemoOptions, run_demo

    options = DemoOptions(
        seed=seed,
        name=name,
        runs=runs,
        steps=steps,
        rollout_nodes=rollout_nodes,
        slow_share=slow_share,
        slow_seconds=slow_seconds,
        config=config,
        overrides=tuple(overrides or ()),
        plain=plain,
        stay=stay,
        tls=tls,
    )
    raise typer.Exit(run_demo(options))


@app.command()
def timeline(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, as runs/demo.")],
) -> None:
    """Draw the pictures of a run anew from its spans; prints their paths."""
    from fermata_cli.commands.timeline import redraw

    raise typer.Exit(redraw(run_dir))


@tools_app.command("call")
def tools_call(
    tool: Annotated[str, typer.Argument(metavar="NAME", help="The tool.")],
    arguments: Annotated[str, typer.Argument(metavar="JSON", help="Arguments, a JSON object; - reads stdin.")] = "{}",
    gateway: Gateway = None,
    deadline: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="For the whole call.")] = 60.0,
    wait: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="To wait for the gateway.")] = 10.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Call one tool. Its output goes to stdout, how the call ended to stderr."""
    from fermata_cli.commands.tools import call_tool

    raise typer.Exit(
        call_tool(
            tool,
            arguments,
            gateway=gateway,
            deadline_s=deadline,
            wait_s=wait,
            as_json=as_json,
            config=config,
            overrides=overrides or (),
        )
    )


@tools_app.command("list")
def tools_list(
    gateway: Gateway = None,
    wait: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="To wait for the gateway.")] = 10.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """The tools a gateway serves, one a line."""
    from fermata_cli.commands.tools import list_tools

    raise typer.Exit(
        list_tools(gateway=gateway, wait_s=wait, as_json=as_json, config=config, overrides=overrides or ())
    )


@config_app.command("show")
def config_show(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """The resolved settings of all processes as YAML: defaults, file, FERMATA_* variables and flags together."""
    from fermata_cli.commands.config import show

    raise typer.Exit(show(config, overrides or ()))


@config_app.command("reference")
def config_reference(
    metrics: Annotated[bool, typer.Option("--metrics", help="What is measured, instead of what can be set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of Markdown.")] = False,
) -> None:
    """Everything that can be set: type, default, bounds and meaning of each key, as Markdown."""
    from fermata_cli.commands.config import reference

    raise typer.Exit(reference(metrics=metrics, as_json=as_json))


@turn_app.command("check")
def turn_check(
    cases: Annotated[Path, typer.Argument(metavar="CASES.jsonl", help="Model outputs and the calls expected of them.")],
    tools: Annotated[Path, typer.Option("--tools", metavar="TOOLS.json", help="JSON array of tools and schemas.")],
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Encode the cases with this model's tokenizer.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Form of calls, where a case names none.")] = "hermes",
    only_misses: Annotated[bool, typer.Option("--only-misses", help="Leave out the cases that passed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a file of cases through the parser and the validator; exit code 1 where one misses."""
    from fermata_cli.commands.turn import check

    raise typer.Exit(check(tools, cases, model=model, default_format=form, only_misses=only_misses, as_json=as_json))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(list(sys.argv[1:] if argv is None else argv), prog_name="fermata", standalone_mode=False)
    except _WRONG_USE as error:
        text = error.format_message()  # type: ignore[attr-defined]
        if text.startswith("Usage:"):  # called with nothing: the help itself
            print(text, file=sys.stderr)
        else:
            _say(f"{_plain(text).rstrip('.')}: see --help")
        return EXIT_USAGE
    except NodeError as error:
        _say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has enough; what Python flushes at its end must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code if isinstance(code, int) else EXIT_OK


def _plain(text: str) -> str:
    """Without the words of the libraries that check flags."""
    text = re.sub(r", unable to parse .*", "", text).replace("Input should be ", "it must be ")
    return text.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _say(text: str) -> None:
    for line in text.splitlines():
        print(f"fermata: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
