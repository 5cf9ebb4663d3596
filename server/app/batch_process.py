"""Runs the lines of a file in the place of a server process, for `weft batch`: no client can reach it.

`python -m weft.server.app.batch_process JOB RUNTIME_DIR LISTEN_FD`, started by the supervisor. Results go to the files
of the job, each once. When all lines have one, it tells the supervisor to end. At SIGTERM it leaves the rest undone:
another process with the same job goes on. Exit code 2: the checkpoint's tokenizer cannot be read.
"""

import asyncio
import os
import pathlib
import signal
import sys
from collections.abc import Mapping

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.engine.wire import errors as logs
from weft.server.apis.batches.line_run import LineRun, LineSource, Slots
from weft.server.apis.batches.lines import Journal
from weft.server.app.app import connected_models, create_app, load_tokenizers
from weft.server.http.metrics import share_metrics
from weft.server.settings import Settings
from weft.server.supervise.runtime_folder import METRICS_NAME
from weft.server.supervise.supervisor import EXIT_CANNOT_START, ready_file
from weft.server.text.tokenizer import Tokenizer, TokenizerError

LINES_PER_PLACE = 2
"""Lines under way for each request that the engine runs at once: so it never waits for one to be read."""
_LOOK_S = 0.1
_TENANT = "weft batch"


class Job(msgspec.Struct, frozen=True):
    """What to run, and where results go.

    Attributes:
        batch_id: Of the input's content.
        model: A name of the model that the lines want.
        num_lines: Of the input.
    """

    batch_id: str
    model: str
    input: str
    output: str
    errors: str
    endpoint: str
    num_lines: int

    @property
    def results(self) -> tuple[pathlib.Path, pathlib.Path]:
        """The files of answers and of errors."""
        return pathlib.Path(self.output), pathlib.Path(self.errors)


def main(job: Job, runtime_dir: pathlib.Path) -> int:
    """Run the lines with the settings on standard input until SIGTERM; returns the exit code."""
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    logs.configure(settings.log_format, "batch")
    try:
        tokenizers = load_tokenizers(settings)
    except TokenizerError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    share_metrics(runtime_dir / METRICS_NAME)
    uvloop.run(_run(job, settings, tokenizers, runtime_dir))
    return 0


async def _run(job: Job, settings: Settings, tokenizers: Mapping[str, Tokenizer], runtime_dir: pathlib.Path) -> None:
    stopping, journal = asyncio.Event(), Journal(job.results)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    try:
        async with connected_models(settings, tokenizers, runtime_dir) as (served, fleet, _):
            app, engine_client = create_app(served, settings, fleet), served[job.model].engine_client
            ready_file(runtime_dir, os.getpid()).touch()
            await engine_client.load()
            while (info := engine_client.info) is None and not stopping.is_set():
                await asyncio.wait((stopped,), timeout=_LOOK_S)
            if info is None:
                return
            slots = Slots(LINES_PER_PLACE * info.max_num_seqs)
            source = LineSource(job.batch_id, pathlib.Path(job.input), job.endpoint, _TENANT)
            lines = LineRun(source, app, app.state.context, slots, journal)
            feeding = asyncio.create_task(lines.feed())
            try:
                await _show_until_done(feeding, stopped, journal, job.num_lines)
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
                await lines.settle()
            if not stopping.is_set():  # to the supervisor it would be the second signal, which forces
                os.kill(os.getppid(), signal.SIGTERM)
                await stopped
    finally:
        stopped.cancel()
        journal.close()


async def _show_until_done(
    feeding: "asyncio.Task[None]", stopped: "asyncio.Task[bool]", journal: Journal, num_lines: int
) -> None:
    """Show a bar on a terminal until the lines are done or are to be left."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("lines", total=num_lines)
        while not feeding.done() and not stopped.done():
            await asyncio.wait((feeding, stopped), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            progress.update(bar, completed=len(journal.done))
    if feeding.done():
        feeding.result()  # raises what went wrong


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Job), pathlib.Path(sys.argv[2])))
