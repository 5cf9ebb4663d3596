"""The `weft` command: `serve`, `batch`, `ray`, `chat`, `plan`, `models`, `doctor`, `config`.

Owns the command line's syntax; `__main__` runs it. Flags are generated from `Settings`. Their values stay text and are
checked together with environment and file. A fault is one line on stderr and exit code 2. Imports little, so that
`weft --help` is quick.
"""

import importlib.metadata
import inspect
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.engine.shared import limits
from weft.server.settings import FLAGS, Resolved, Settings, StartError, flag_name, resolve
from weft.server.terminal.settings_table import describe, describe_values


class _Group(TyperGroup):
    """The command group. Prints a fault as one line instead of a box."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with the command's exit code."""
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # Depending on the version, usage errors are click's or typer's copy of them; both have format_message.
            message = str(error) if isinstance(error, StartError) else getattr(error, "format_message", lambda: None)()
            message = message or limits.explain(error)
            if message is None:
                raise
            print(f"weft: error: {message}", file=sys.stderr)
            sys.exit(2)


app = typer.Typer(cls=_Group, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _with_flags(
    command: Callable[..., None], required: Mapping[str, Any] = MappingProxyType({})
) -> Callable[..., None]:
    """Add the MODEL argument, --config, and a flag for every setting in FLAGS to a command.

    Args:
        required: The annotations of further parameters that the command needs, which come first.
    """

    def run(config: pathlib.Path | None, **given: object) -> None:
        more = {name: given.pop(name) for name in required}
        flags = {name: value for name, value in given.items() if value not in (None, [])}
        flags |= {name: False for name in flags if Settings.model_fields[name].default is True}  # --no-...
        command(resolve(flags, os.environ, config), **more)

    model = typer.Argument(show_default=False, help=Settings.model_fields["model"].description)
    file = typer.Option("--config", metavar="FILE", help="YAML file with settings; it may hold every setting.")
    optional = {"model": Annotated[str | None, model], "config": Annotated[pathlib.Path | None, file]}
    optional |= {name: _flag(name) for name in FLAGS}
    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(inspect.Parameter(name, keyword, annotation=kind) for name, kind in required.items()),
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
    metavar = values.replace(", ", "|") if field.default in values.split(", ") else values.split()[0].upper()
    kind = list[str] | None if field.default == () else str | None
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
    from weft.server.run import supervisor

    raise typer.Exit(supervisor.run(*_found(resolved.settings)))


def _found(settings: Settings) -> tuple[Settings, pathlib.Path]:
    """See `checkpoint.find`; logs what the operator should know of the model."""
    from weft.engine.shared import logs
    from weft.server.run import checkpoint
    from weft.server.run.model_check import check_tokenizer

    logs.configure(settings.log_format, "supervisor")
    settings, model = checkpoint.find(settings)
    for note in check_tokenizer(model):
        logging.getLogger(__name__).warning("%s", note)
    return settings, model


_BATCH = {
    "source": Annotated[pathlib.Path, typer.Argument(metavar="INPUT", help="JSON lines, as in the input of a batch.")],
    "output": Annotated[
        pathlib.Path,
        typer.Option("--output", "-o", help="File for the answers; errors go to a file beside it, OUTPUT.errors."),
    ],
}


@app.command()
@partial(_with_flags, required=_BATCH)
def batch(resolved: Resolved, source: pathlib.Path, output: pathlib.Path) -> None:
    """Answer the lines of a file without a server; started again, go on where it ended."""
    from weft.server.terminal.batch import run_batch

    settings, model = _found(resolved.settings)
    raise typer.Exit(run_batch(settings, model, source, output))


_RAY = {
    "replicas": Annotated[
        str,
        typer.Option(metavar="N", default_factory=lambda: "1", help="Number of replicas; 1:4 lets load decide."),
    ],
    "cpus": Annotated[
        float,
        typer.Option(metavar="N", default_factory=lambda: 1.0, help="Cores that a replica reserves, beside its GPUs."),
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
def ray_deploy(resolved: Resolved, replicas: str, cpus: float, address: str) -> None:
    """Serve a model by replicas on a Ray cluster; again, to replace them one after the other."""
    from weft.server.ray.deploy import deploy

    raise typer.Exit(deploy(resolved.settings, replicas, cpus, address))


@app.command()
@_with_flags
def plan(resolved: Resolved) -> None:
    """Show how much memory a model needs and how many requests fit, without loading it."""
    import msgspec

    from weft.server.run import checkpoint
    from weft.server.run.child import python_command
    from weft.server.run.model_check import check_tokenizer
    from weft.server.settings import engine_options

    settings = resolved.settings
    model = checkpoint.resolve(settings.model, is_plan=True, model_impl=settings.model_impl)
    for note in check_tokenizer(model):
        print(f"weft: note: {note}", file=sys.stderr)
    draft = checkpoint.resolve_draft(settings.speculative, is_plan=True, model_impl=settings.model_impl)
    settings = settings.model_copy(update={"speculative": draft})
    options = msgspec.json.encode(engine_options(settings, model))
    raise typer.Exit(subprocess.run(python_command("weft.engine.run.print_plan"), input=options).returncode)


@app.command()
def models() -> None:
    """List the architectures of transformers, and how each is served or why it is not."""
    from weft.server.terminal.models import describe_models

    print(describe_models())


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="Any OpenAI-compatible server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to talk to; default: the first that the server lists.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer; default: the server's.")] = None,
) -> None:
    """Talk to a server in the terminal, or answer standard input if it is a pipe."""
    from weft.server.terminal.chat import chat as run

    options: dict[str, object] = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    raise typer.Exit(run(url, api_key, model, system, given))


@app.command()
@_with_flags
def doctor(resolved: Resolved) -> None:
    """Check the machine and the installation, and name what is missing to serve with these settings."""
    from weft.server.terminal.doctor import run

    raise typer.Exit(run(resolved.settings))


@app.command()
@_with_flags
def config(resolved: Resolved) -> None:
    """Print every setting and the origin of its value."""
    print(describe(resolved))
