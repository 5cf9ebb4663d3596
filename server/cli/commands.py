"""The `weft` command: to serve, to talk, to fetch models and see what is there, to plan and to look at the machine.

Owns the command line's syntax; `__main__` runs it. Flags are generated from `Settings`. Their values stay text and are
checked together with environment and file. A fault is one line on stderr and exit code 2. Imports little, so that
`weft --help` is quick.
"""

import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from weft.engine.wire import errors as wire
from weft.server.cli.tables import describe, describe_values
from weft.server.resolve import Resolved, check_adapters, resolve
from weft.server.settings import FLAGS, Settings, StartError, engine_options, flag_name

logger = logging.getLogger(__name__)


_ELSEWHERE = {
    "stop": "Ctrl-C or SIGTERM ends `weft serve`, once it has answered what it has begun",
    "top": "`weft ps` shows what a server has loaded; `weft serve` shows its load on a terminal",
    "help": "`weft --help` lists the commands, `weft COMMAND --help` describes one",
}
"""Commands of other tools, and what to do here."""


class _Group(TyperGroup):
    """The command group. Prints a fault as one line instead of a box."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; one that only other tools have ends with a hint."""
        if cmd_name in _ELSEWHERE:
            raise StartError(f"there is no command {cmd_name}: {_ELSEWHERE[cmd_name]}")
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with the command's exit code."""
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # Depending on the version, usage errors are click's or typer's copy of them; both have format_message.
            message = str(error) if isinstance(error, StartError) else getattr(error, "format_message", lambda: None)()
            message = message or wire.explain(error)
            if message is None:
                raise
            print(f"weft: error: {message}", file=sys.stderr)
            sys.exit(2)


_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=_Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_HELP
)


def _with_flags(
    command: Callable[..., None],
    required: Mapping[str, Any] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """Add the MODEL argument, --config, and a flag for every setting in FLAGS to a command.

    Args:
        required: The annotations of further parameters that the command needs, which come first.
        defaults: Of those of them that may be left out.
    """

    def run(config: Path | None, **given: object) -> None:
        more = {name: given.pop(name) for name in required}
        flags = {name: value for name, value in given.items() if value not in (None, [])}
        flags |= {name: False for name in flags if Settings.model_fields[name].default is True}  # --no-...
        command(resolve(flags, os.environ, config), **more)

    model = typer.Argument(show_default=False, help=Settings.model_fields["model"].description)
    file = typer.Option("--config", metavar="FILE", help="YAML file with settings; it may hold every setting.")
    optional = {"model": Annotated[str | None, model], "config": Annotated[Path | None, file]}
    optional |= {name: _flag(name) for name in FLAGS}
    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(
                inspect.Parameter(name, keyword, default=defaults.get(name, inspect.Parameter.empty), annotation=kind)
                for name, kind in required.items()
            ),
            *(inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in optional.items()),
        ]
    )
    run.__annotations__ = {**required, **optional}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _flag(name: str) -> Any:
    """The annotation from which typer makes a flag: text, or a switch."""
    field = Settings.model_fields[name]
    if isinstance(field.default, bool):
        meaning = f"Turn off: {field.description}" if field.default else field.description
        return Annotated[bool | None, typer.Option(flag_name(name), help=meaning)]
    values = describe_values(name)
    metavar = (
        {"lora": "NAME=FOLDER", "default_sampling": "NAME=NUMBER"}[name]
        if values == "mapping"
        else values.replace(", ", "|")
        if field.default in values.split(", ")
        else values.split()[0].upper()
    )
    kind = list[str] | None if field.default in ((), {}) else str | None
    return Annotated[kind, typer.Option(flag_name(name), metavar=metavar, help=field.description)]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"weft {importlib.metadata.version('weft')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _weft(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)] = False,
) -> None:
    """An OpenAI-compatible inference server."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@_with_flags
def serve(resolved: Resolved) -> None:
    """Serve a model over HTTP."""
    from weft.server.supervise import supervisor

    raise typer.Exit(supervisor.run(_found(resolved.settings)))


def _found(settings: Settings, *, is_plan: bool = False) -> Settings:
    """Settings with the names of models filled in, and with folders as models and drafts; fetches what is missing."""
    from weft.server.library.library import shown_progress
    from weft.server.supervise import checkpoint

    if not is_plan:
        wire.configure(settings.log_format, "supervisor")
    tell = (lambda note: print(f"weft: note: {note}", file=sys.stderr)) if is_plan else logger.warning
    if not settings.models and not settings.served_model_name:
        settings = settings.model_copy(update={"served_model_name": (checkpoint.served_name(settings.model),)})
    check_adapters(settings)
    with shown_progress(tell if is_plan else logger.info, has_bars=settings.log_format == "text") as report:
        find = partial(checkpoint.find, is_plan=is_plan, tell=tell, report=report)
        if not settings.models:
            return settings.model_copy(update=find(settings))
        models = {
            name: entry.model_copy(update=find(settings.for_model(name), f"models: {name}"))
            for name, entry in settings.models.items()
        }
    return settings.model_copy(update={"models": models})


_BATCH = {
    "source": Annotated[Path, typer.Argument(metavar="INPUT", help="JSON lines, as in the input of a batch.")],
    "output": Annotated[
        Path, typer.Option("--output", "-o", help="File for the answers; errors go to a file beside it, OUTPUT.errors.")
    ],
}


@app.command()
@partial(_with_flags, required=_BATCH)
def batch(resolved: Resolved, source: Path, output: Path) -> None:
    """Answer the lines of a file without a server; started again, go on where it ended."""
    from weft.server.cli.batch import run_batch

    raise typer.Exit(run_batch(_found(resolved.settings), source, output))


_RAY = {
    "replicas": Annotated[
        str, typer.Option(metavar="N", default_factory=lambda: "1", help="Number of replicas; 1:4 lets load decide.")
    ],
    "cpus": Annotated[
        float,
        typer.Option(metavar="N", default_factory=lambda: 1.0, help="Cores that a replica reserves, beside its GPUs."),
    ],
    "prefill_replicas": Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            default_factory=lambda: 0,
            help="Replicas beside them that compute long prompts for them, over a kv_offload_dir that all share.",
        ),
    ],
    "address": Annotated[
        str,
        typer.Option(
            envvar="RAY_ADDRESS",
            default_factory=lambda: "local",
            help="Cluster, such as auto or HOST:6379. Default: a Ray of its own on this machine, until a signal.",
        ),
    ],
}
_ray = typer.Typer(help="Serve on many machines with Ray Serve (needs weft[ray]).", no_args_is_help=True)
app.add_typer(_ray, name="ray")


@_ray.command("deploy")
@partial(_with_flags, required=_RAY)
def ray_deploy(resolved: Resolved, replicas: str, cpus: float, prefill_replicas: int, address: str) -> None:
    """Serve a model by replicas on a Ray cluster; again, to replace them one after the other."""
    from weft.server.ray.deploy import deploy

    raise typer.Exit(deploy(resolved.settings, replicas, cpus, address, prefill_replicas))


@app.command()
@_with_flags
def plan(resolved: Resolved) -> None:
    """Show how much memory models need and how many requests fit, without loading one."""
    from weft.server.cli.reports import show_plan

    raise typer.Exit(show_plan(_found(resolved.settings, is_plan=True)))


_PORT = os.environ.get("WEFT_PORT", "")
_LOCAL = f"http://127.0.0.1:{_PORT if _PORT.isdecimal() else 8000}"
"""Where `weft serve` listens, told no host."""
_Url = Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="Any OpenAI-compatible server, with or without /v1.")]
_Key = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")]


_SIMULATE = {
    "trace": Annotated[Path, typer.Argument(help="JSON lines, one request each, as Mooncake's traces.")],
    "replicas": Annotated[list[int], typer.Option(help="Number of replicas; may be given several times.")],
    "hash_tokens": Annotated[int, typer.Option(help="Tokens of a prompt that each of its hash_ids stands for.")],
    "costs": Annotated[
        Path | None, typer.Option(help="File of what steps cost; measured and written if it is missing.")
    ],
}


@app.command()
@partial(_with_flags, required=_SIMULATE, defaults={"replicas": [1], "hash_tokens": 512, "costs": None})
def simulate(resolved: Resolved, trace: Path, replicas: list[int], hash_tokens: int, costs: Path | None) -> None:
    """Tell what clients would see if a trace of requests came to so many replicas, on machines like this one."""
    from weft.server.cli.simulate import simulate

    if resolved.settings.models:
        raise StartError("models: weft simulate replays a trace on one model; name it as MODEL")
    if resolved.settings.nnodes > 1:
        raise StartError("nnodes: weft simulate measures steps on this machine alone")
    settings = _found(resolved.settings)
    shared = dict.fromkeys(("kv_events", "kv_events_topic", "kv_events_replay", "kv_offload_dir"))
    settings = settings.model_copy(update={**shared, "kv_offload": 0, "kv_role": "none"})
    simulate(engine_options(settings, Path(settings.model or "")), trace, replicas, hash_tokens, costs)


@app.command("ps")
@app.command()
def models(
    url: _Url = _LOCAL,
    api_key: _Key = None,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="List what can be served instead, and why the rest cannot.")
    ] = False,
) -> None:
    """List the models of a running server: their state, memory and last use."""
    from weft.server.cli.reports import describe_architectures, list_models

    if architectures:
        print(describe_architectures())
        return
    raise typer.Exit(list_models(url, api_key))


_Name = Annotated[
    str, typer.Argument(help="org/model, org/model-GGUF:Q4_K_M, an address, or a name that weft pull lists.")
]


@app.command()
def pull(
    name: Annotated[str | None, typer.Argument(help="As for weft serve. Default: list some models.")] = None,
) -> None:
    """Fetch a model from the hub or a web server, or list good ones with what fits this machine first."""
    from weft.server.cli import library

    library.pull(name) if name else library.show_known()


@app.command("list")
def list_library() -> None:
    """List the models that were fetched."""
    from weft.server.cli import library

    library.show_list()


@app.command("rm")
def remove(name: _Name) -> None:
    """Remove a model that was fetched."""
    from weft.server.library import library

    library.remove(name)
    print(f"removed {name}")


@app.command()
def show(name: _Name) -> None:
    """Show what a model that was fetched is, what it can do, and what memory it takes."""
    from weft.server.cli import library

    library.check_is_here(name)
    raise typer.Exit(library.show(_found(resolve({"model": name}, os.environ).settings, is_plan=True)))


@app.command()
def run(
    name: _Name,
    prompt: Annotated[
        str | None, typer.Argument(help="A question. Default: a conversation, or standard input.")
    ] = None,
) -> None:
    """Talk to a model: fetch it if need be, serve it on a free port, and end it afterwards."""
    from weft.server.cli import library

    raise typer.Exit(library.run(_found(resolve({"model": name}, os.environ).settings), name, prompt))


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(show_default=False, help="Answer this alone, and leave.")] = None,
    url: _Url = _LOCAL,
    model: Annotated[
        str | None, typer.Option(help="Model to talk to; default: the first that the server lists.")
    ] = None,
    api_key: _Key = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer; default: the server's.")] = None,
) -> None:
    """Talk to a server in the terminal, or answer a prompt, and standard input if it is a pipe."""
    from weft.server.cli.chat import chat as run

    options: dict[str, object] = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    raise typer.Exit(run(url, api_key, model, system, given, prompt))


@app.command()
def launch(
    agent: Annotated[Literal["claude", "codex", "opencode", "qwen", "aider"], typer.Argument(help="Coding agent.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(show_default=False, help="The agent's own arguments, behind --.")
    ] = None,
    url: _Url = _LOCAL,
    api_key: _Key = None,
    model: Annotated[
        str | None, typer.Option(help="Model to work with; default: the first that the server lists.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Start the agent, instead of printing how.")] = False,
) -> None:
    """Print what a coding agent needs to work with a server, or start it so."""
    from weft.server.cli.launch import launch

    raise typer.Exit(launch(agent, url, api_key, model, arguments or [], runs=run))


@app.command()
@_with_flags
def doctor(resolved: Resolved) -> None:
    """Check the machine and the installation, and name what is missing to serve with these settings."""
    from weft.server.cli.doctor import run

    raise typer.Exit(run(resolved.settings))


@app.command()
@_with_flags
def config(resolved: Resolved) -> None:
    """Print every setting and the origin of its value."""
    print(describe(resolved))
