"""Checks of the machine and the model for `weft doctor`. Each takes facts and returns a finding."""

from weft.engine.shared.tokenizer_files import TOKENIZER_KINDS
from weft.server.http.connections import SHARE_OF_FILES
from weft.server.terminal.finding import Finding, gigabytes

MIN_FREE_BYTES = 10**9
MIN_SHARED_BYTES = 64 << 20
MIN_RUNTIME_BYTES = 10 << 20
_NUM_RUNNING = 64
_HUB_ADVICE = {401: "set HF_TOKEN", 403: "accept its terms on the hub and set HF_TOKEN", 404: "check the spelling"}


def check_memory(free_bytes: int, weights_bytes: int) -> Finding:
    """Free memory of the host against the size of the weights (0: unknown); `weft plan` knows more."""
    detail = f"{gigabytes(free_bytes)} free"
    if weights_bytes >= free_bytes:
        detail += f", and the files of the weights take {gigabytes(weights_bytes)}"
        advice = "serve a smaller model, or stop other programs; weft plan says what a model needs"
        return Finding("memory", "note", detail, advice)
    if free_bytes < MIN_FREE_BYTES:
        return Finding("memory", "note", detail, "stop other programs, or give the container more")
    return Finding("memory", "ok", detail)


def check_port(host: str, port: int, fault: str | None, owner: str | None) -> Finding:
    """Whether the address can be listened on. fault: why not (None: it can); owner: who has it (None: unknown)."""
    if fault is None:
        return Finding("port", "ok", f"{host} port {port} is free")
    has_it = f", {owner} has it" if owner else ""
    return Finding("port", "missing", f"{fault}{has_it}", "stop that process, or choose another port with --port")


def check_folder(folder: str, names: list[str]) -> Finding:
    """A local model, judged by the names of its files."""
    lacking = [] if "config.json" in names else ["config.json"]
    lacking += [] if any(set(kind) <= set(names) for kind in TOKENIZER_KINDS) else ["tokenizer.json"]
    lacking += [] if any(name.endswith(".safetensors") for name in names) else ["weights (*.safetensors)"]
    if not lacking:
        return Finding("model", "ok", folder)
    advice = "a model is a folder in Hugging Face layout; pickled weights are not read"
    return Finding("model", "missing", f"{folder} has no {', no '.join(lacking)}", advice)


def check_hub(model: str, answer: int | str, is_cached: bool) -> Finding:
    """A hub id. answer: the status of a request for its config.json, or why there was none."""
    if answer == 200:
        return Finding("model", "ok", f"{model} is on the hub{' and in the cache' if is_cached else ''}")
    if is_cached:
        detail = f"{model} is in the cache; the hub says {answer}"
        return Finding("model", "note", detail, "weft plan says whether Weft can run it")
    if isinstance(answer, str):
        advice = "check network, proxy and HF_ENDPOINT, or name a local folder"
        return Finding("model", "missing", f"{model}: the hub cannot be reached ({answer})", advice)
    return Finding("model", "missing", f"{model}: the hub answers {answer}", _HUB_ADVICE.get(answer, "try again later"))


def check_shared_memory(free_bytes: int | None) -> Finding:
    """/dev/shm, which multi-GPU libraries use. free_bytes None: it cannot be written to."""
    if free_bytes is None:
        return Finding("/dev/shm", "note", "cannot be written to", "mount a tmpfs there (docker run --shm-size 1g)")
    if free_bytes < MIN_SHARED_BYTES:
        return Finding("/dev/shm", "note", f"{free_bytes >> 20} MiB free", "make it larger (docker run --shm-size 1g)")
    return Finding("/dev/shm", "ok", f"{gigabytes(free_bytes)} free")


def check_open_files(limit: int, max_num_waiting: int) -> Finding:
    """The hard limit on open files, to which a server raises its own, against the number of streams."""
    num_connections = int(limit * SHARE_OF_FILES)
    wanted = max_num_waiting + _NUM_RUNNING
    if num_connections < wanted:
        detail = f"at most {limit}, {num_connections} for connections, and {max_num_waiting} requests may wait"
        advice = f"a hard limit of {1 << int(wanted / SHARE_OF_FILES).bit_length()} (ulimit -Hn) for weft serve"
        return Finding("open files", "note", detail, advice)
    return Finding("open files", "ok", f"at most {limit}")


def check_runtime_folder(folder: str, free_bytes: int | None) -> Finding:
    """The folder of sockets and status page. free_bytes None: it cannot be written to."""
    if free_bytes is None or free_bytes < MIN_RUNTIME_BYTES:
        fault = "cannot be written to" if free_bytes is None else f"has {free_bytes >> 10} KiB left"
        return Finding("runtime folder", "missing", f"{folder} {fault}", "set XDG_RUNTIME_DIR to a folder of yours")
    return Finding("runtime folder", "ok", folder)
