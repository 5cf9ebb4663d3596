"""`weft batch`: answers the lines of a file, as /v1/batches does, without a server that anybody could reach.

Everything that is wrong with the input is told before an engine starts. Results are on the disk line by line, so the
same command goes on where an earlier one was ended, whatever ended it.
"""

import contextlib
import fcntl
import hashlib
import logging
import pathlib
import sys
import time
from collections.abc import Iterator

import msgspec

from weft.server.apis.batches.line_run import result_id
from weft.server.apis.batches.lines import ENDPOINTS, InputLine, Journal, check_input, read_lines
from weft.server.app.batch_process import Job
from weft.server.settings import Settings, StartError
from weft.server.supervise.spawn import python_command
from weft.server.supervise.supervisor import Commands, run

EXIT_INCOMPLETE = 1
"""Some lines have an error, or no result yet."""


def run_batch(settings: Settings, source: pathlib.Path, output: pathlib.Path) -> int:
    """Answer the lines of a file that have no result in output, or in its errors file.

    Args:
        settings: With the names of models filled in.

    Returns:
        The exit code: 0 if every line is answered.

    Raises:
        StartError: This is another machine than the first, the input has faults, or the output holds something else.
    """
    if settings.node_rank:
        raise StartError("node_rank: weft batch is for the first machine; weft serve follows it on the others")
    job = _job(settings, source, output)
    with _locked(output):
        return _run(job, settings)


def _run(job: Job, settings: Settings) -> int:
    before = _counted(job)
    began = time.monotonic()
    if len(before.done) < job.num_lines:
        logging.getLogger("weft").setLevel(logging.WARNING)  # the supervisor would say what it serves, to nobody
        private = {"host": "127.0.0.1", "port": 0, "server_processes": 1, "data_dir": None}
        command = python_command("weft.engine.start.launch", "weft.server.app.batch_process")
        commands = Commands(server=(*command, msgspec.json.encode(job).decode()))
        code = run(settings.model_copy(update=private), commands, shows_status=False)
        if code:
            return code
    after = _counted(job)
    seconds = time.monotonic() - began
    num_tokens = after.usage.output_tokens - before.usage.output_tokens
    for path in job.results:
        if path.stat().st_size == 0:
            path.unlink()
    completed, failed = after.counts
    left = job.num_lines - completed - failed
    print(
        f"{completed} of {job.num_lines} lines answered in {job.output}"
        + (f", {failed} failed: see {job.errors}" if failed else "")
        + (f"; {left} are left, and the same command goes on with them" if left else "")
        + f" ({num_tokens} output tokens in {seconds:.1f} s, start included)",
        file=sys.stderr,
    )
    return EXIT_INCOMPLETE if failed or left else 0


@contextlib.contextmanager
def _locked(output: pathlib.Path) -> Iterator[None]:
    """Keep a second command away from the output; the kernel unlocks it whatever ends this one."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(output.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"{output} is being written by another command") from None
        except OSError as error:
            raise StartError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from None
        yield


def _job(settings: Settings, source: pathlib.Path, output: pathlib.Path) -> Job:
    try:
        first = next(read_lines(source, settings.max_body_bytes), (0, b""))[1]
        endpoint = _endpoint(first)
        count, named, faults = check_input(source, endpoint, settings.max_body_bytes)
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise StartError(f"{source} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if faults:
        told = [
            f"{source}:{fault['line']}: {fault['message']}" if fault["line"] else fault["message"] for fault in faults
        ]
        raise StartError("\n".join((f"{source} has faults; nothing was computed", *told)))
    names = [*settings.names, *(lora for name in settings.fleet for lora in settings.for_model(name).lora)]
    if named is not None and named not in names and not settings.any_model_name:
        known = ", ".join(names)
        message = f"{source} asks for the model {named!r}, and this one is {known} (--served-model-name, --lora)"
        raise StartError(message)
    errors = output.with_name(f"{output.stem}.errors{output.suffix}")
    digest.update("".join(settings.names).encode())
    model = named if named in names else names[0]
    return Job(f"batch_{digest.hexdigest()[:24]}", model, str(source), str(output), str(errors), endpoint, count)


def _endpoint(line: bytes) -> str:
    try:
        url = msgspec.json.decode(line, type=InputLine).url
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return next(iter(ENDPOINTS))  # the check of all lines tells what is wrong
    if url not in ENDPOINTS:
        raise StartError(f"url must be one of {', '.join(ENDPOINTS)}, got {url!r} in the first line")
    return url


def _counted(job: Job) -> Journal:
    """The results that there are; the journal is closed."""
    prefix = b'{"id":"' + result_id(job.batch_id, 0)[:-1].encode()
    try:
        for path in job.results:
            if path.exists():
                with path.open("rb") as file:
                    head = file.readline(len(prefix))
                if not prefix.startswith(head[: len(prefix)]):
                    raise StartError(
                        f"{path} holds something else than results of {job.input} and this model: name another output"
                    )
        journal = Journal(job.results)
    except (OSError, ValueError) as error:
        raise StartError(f"{job.output} cannot be written: {error}") from None
    journal.close()
    return journal
