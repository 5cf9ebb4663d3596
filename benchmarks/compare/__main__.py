"""Weft beside its peers: `make bench`, or python -m benchmarks.compare.

Starts each server afresh for every run, puts the same requests to it, and prints medians and ratios; writes bench.json
and bench.svg. Without peers it measures Weft alone. vLLM is taken from $PEERS/vllm (~/.cache/weft-peers), llama.cpp's
server from the path or $LLAMA_SERVER with --gguf. Measure on a machine that does nothing else. Figures for keeps, with
--out, are those of a commit: a working tree with changes is refused.
"""

import argparse
import dataclasses
import datetime
import pathlib
import shlex
import signal
import sys

from rich.console import Console

from benchmarks.compare import checkpoints, machine, picture, report, servers
from benchmarks.compare.load import LoadError
from benchmarks.compare.measure import Sitting
from benchmarks.compare.servers import Server, ServerError
from benchmarks.compare.workloads import WORKLOADS, Workload

SCRATCH = pathlib.Path("build/bench")
"""Folder of results that nobody keeps."""

UNKNOWN_VOCAB_SIZE = 1000
"""Ids below this exist in every vocabulary; the one of a server that is running already is not known."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = "".join(workload.key for workload in WORKLOADS)
    parser.add_argument("--runs", type=int, default=1, help="repetitions, of which medians are taken (default: 1)")
    parser.add_argument("--workloads", default=keys, help=f"which ones, by letter (default: {keys})")
    parser.add_argument("--requests", type=int, help="at most so many per workload, for a quick look")
    parser.add_argument("--servers", help="which ones, by name, comma-separated (default: all that are found)")
    parser.add_argument("--model", type=pathlib.Path, help="checkpoint (default: random weights, made on first use)")
    parser.add_argument("--gguf", type=pathlib.Path, action="append", default=[], help="the model for llama.cpp")
    parser.add_argument("--tiny-gguf", type=pathlib.Path, help="the tiny model for llama.cpp")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS", help="Weft with other flags")
    parser.add_argument("--url", help="measure the server that runs there, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--timeout", type=float, default=900, help="most seconds for a start or a request")
    parser.add_argument("--out", type=pathlib.Path, help=f"folder for results that are kept (default: {SCRATCH})")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.workloads) - set(keys):
        parser.error(f"no workload {''.join(sorted(unknown))}: there are {keys}")
    if parsed.runs < 1 or (parsed.requests is not None and parsed.requests < 1):
        parser.error("--runs and --requests must be at least 1")
    machine.refuse_changes(parser, parsed.out)
    return parsed


def choose_workloads(options: argparse.Namespace) -> list[Workload]:
    """Return what to run, shortened if asked; a server that runs already has one model, the tiny one or not."""
    chosen = [workload for workload in WORKLOADS if workload.key in options.workloads]
    if options.url and len({workload.model for workload in chosen}) > 1:
        chosen = [workload for workload in chosen if workload.model == "main"]
    return [
        dataclasses.replace(w, num_requests=min(w.num_requests, options.requests or w.num_requests)) for w in chosen
    ]


def find_servers(options: argparse.Namespace, models: dict[str, pathlib.Path]) -> list[Server]:
    """Return Weft, its variants, and the peers that are there.

    Raises:
        ServerError: One that was asked for is not.
    """
    found = [servers.weft(models)]
    for variant in options.variant:
        name, _, flags = variant.partition("=")
        found.append(servers.weft(models, name, shlex.split(flags)))
    found += [server for server in [servers.vllm(models)] if server]
    for gguf in options.gguf:
        files = {"main": gguf} | ({"tiny": options.tiny_gguf} if options.tiny_gguf else {})
        found.append(servers.llama_cpp(f"llama.cpp {gguf.stem.rpartition('-')[2]}", files))
    if options.servers is None:
        return found
    wanted = options.servers.split(",")
    by_name = {server.name.lower(): server for server in found}
    if missing := [name for name in wanted if name.lower() not in by_name]:
        raise ServerError(f"no server {', '.join(missing)}: found are {', '.join(server.name for server in found)}")
    return [by_name[name.lower()] for name in wanted]


def run(options: argparse.Namespace, console: Console) -> report.Report:
    """Measure.

    Raises:
        ServerError: A server that was asked for is not there.
        LoadError: The server at --url did not answer as it should.
    """
    workloads = choose_workloads(options)
    models: dict[str, pathlib.Path] = {}
    if not options.url or options.model:
        for key in dict.fromkeys(workload.model for workload in workloads):
            is_given = options.model and (key == "main" or options.url)
            with console.status(f"writing the checkpoint {checkpoints.NAMES[key]}"):
                models[key] = options.model.resolve() if is_given else checkpoints.checkpoint(key)
    sizes = {key: machine.read_model(folder) for key, folder in models.items()}
    found = [] if options.url else find_servers(options, models)
    here = machine.describe()
    if here.load_average > 0.5:
        console.print(f"[yellow]The machine is busy: load average {here.load_average:.1f}. Figures will suffer.")
    logs = checkpoints.cache_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    vocab_sizes = {w.model: sizes[w.model].vocab_size if sizes else UNKNOWN_VOCAB_SIZE for w in workloads}
    sitting = Sitting(console, workloads, vocab_sizes, logs, options.seed, options.timeout)
    num_runs = measure(sitting, found, options)
    best = max(here.memory_read_gb_per_s, round(machine.read_bandwidth() / 1e9, 1))
    here = dataclasses.replace(here, memory_read_gb_per_s=best)
    names = [server.name for server in found] or [options.url]
    return report.Report(
        date=datetime.date.today().isoformat(),
        command=describe_command(sys.argv[1:]),
        machine=here,
        models=sizes,
        workloads=workloads,
        servers=names,
        num_runs=num_runs,
        lines=report.make_lines(sitting.results, names, workloads, sizes, here.memory_read_gb_per_s * 1e9),
        results=sitting.results,
    )


def measure(sitting: Sitting, found: list[Server], options: argparse.Namespace) -> int:
    """Run it all; returns how many rounds count. When interrupted, those do that were complete.

    Raises:
        KeyboardInterrupt: Not even one was.
    """
    for number in range(1, options.runs + 1):
        try:
            if options.url:
                sitting.measure_url(options.url, options.url, number)
            for server in found:
                sitting.measure(server, number)
        except KeyboardInterrupt:
            if number == 1:
                raise
            sitting.results.forget(number)
            return number - 1
    return options.runs


def describe_command(arguments: list[str]) -> str:
    """Return the command that measures this again, without the name of whoever ran it."""
    flags = shlex.join(arguments).replace(str(pathlib.Path.home()), "~")
    return f"make bench ARGS={shlex.quote(flags)}" if flags else "make bench"


def main() -> None:
    """Run the command; the exit code is 1 when something could not be measured."""
    options, console = parse(sys.argv[1:]), Console()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # so that servers end with it, as they do on Ctrl-C
    try:
        done = run(options, console)
    except (ServerError, LoadError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    folder: pathlib.Path = options.out or SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    done.write_json(folder / "bench.json")
    (folder / "bench.svg").write_text(picture.draw(done))
    console.print(*done.caption(), sep="\n", style="dim", highlight=False, soft_wrap=True)
    console.print(report.format_table(done))
    console.print(f"written: {folder / 'bench.json'} and bench.svg")
    sys.exit(1 if done.results.faults else 0)


if __name__ == "__main__":
    main()
