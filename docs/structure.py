"""What docs/structure.md says of the tree: a line for each module, and the reading path with its length.

A module's line is the first sentence of its docstring, or of the comment that opens a C or JavaScript file. Only what
no module can say is written here: what a folder is for, and in which order to read.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

FOLDERS = {
    "server": "The way into the `weft` command, settings and errors. `demo_model/` holds the bundled weights.",
    "server/run": "Processes: the supervisor, what it starts and watches, and where they find the model.",
    "server/http": "HTTP apart from any API: connections, access, streams, metrics, what every route shares.",
    "server/store": "What outlives a request: a bounded database and files, shared by all server processes.",
    "server/mcp": "The client of MCP servers: their tools are listed and called in bounded time and bytes.",
    "server/model": "A served model: the client of its engine, its formats, its defaults.",
    "server/gguf": "GGUF files as folders in Hugging Face layout.",
    "server/api": "One file for each group of routes; those that generate make a task of a body.",
    "server/batch": "Batches: checks of their lines, the journal of results, and the task that runs them.",
    "server/schemas": "Wire shapes of bodies and answers, as pydantic models.",
    "server/request": "From a checked body to a task, in no API's words.",
    "server/text": "Chat template, tokenizer, detokenizer, stop strings.",
    "server/formats": "How models write reasoning and tool calls: one file for each family of formats.",
    "server/generate": "From a task to typed events: prompts, plan, choices, their parsing.",
    "server/render": "Typed events to the JSON of each API.",
    "server/ray": "Weft on Ray Serve, and which replica a request goes to.",
    "server/terminal": "The `weft` command and what it shows.",
    "server/chat_page": "The chat page: `index.html`, a style sheet and JavaScript modules, served as they are.",
    "engine/shared": "What both processes share: messages, sampling parameters, status page, logs. Imports neither.",
    "engine/run": "The engine process: start-up, configuration, memory plan, model runner, draft model, crash record.",
    "engine/core": "The step: requests, queue, scheduler, budgets, beams, drafts, collector.",
    "engine/cache": "The KV cache as block ids: specs, lookup, allocation, eviction, pins.",
    "engine/step": "What one step carries to the device and back: the seam between scheduling and computing.",
    "engine/models": "From `config.json` to a decoder: the parts that all families share.",
    "engine/models/families": "One file for each family of models, as data.",
    "engine/fallback": "Transformers' own modules over Weft's cache, for architectures without a family.",
    "engine/lora": "Low-rank adapters (LoRA): their files, where they act in a model, and the rows that use them.",
    "engine/layers": "Blocks, their parts, and the seams to kernels: layers and attention.",
    "engine/weights": "From a checkpoint to tensors: references, the reader, sources, upload.",
    "engine/kernels": "Implementations by device; here what all of them share.",
    "engine/kernels/torch": "Plain torch: the reference for tests, and what runs where nothing faster does.",
    "engine/kernels/cpu": "Weft's own kernels for bfloat16 on x86-64, in C.",
    "engine/kernels/triton": "Weft's own kernels for CUDA, in Triton.",
    "engine/sampling": "Logits to ids: penalties, masks, filters, the draw, log-probabilities.",
    "engine/guidance": "Grammars and reasoning budgets: what may be sampled next, and what must be.",
    "engine/offload": "What falls out of the cache, kept in the host's memory and on disk.",
    "engine/speculation": "Guesses of the next tokens, and how many of them.",
}
"""What each folder is for, in the order of the page."""

CHAT_REQUEST = (
    "server/api/chat_completions.py",
    "server/task/body.py",
    "server/request/read_body.py",
    "server/task/task.py",
    "server/request/params.py",
    "server/request/messages.py",
    "server/text/chat_template.py",
    "server/text/tokenizer.py",
    "server/generate/pipeline.py",
    "server/generate/prompts.py",
    "server/generate/answer.py",
    "server/models/engine_client.py",
    "engine/shared/messages.py",
    "engine/shared/sampling_params.py",
    "server/generate/choice_stream.py",
    "server/generate/events.py",
    "server/text/detokenizer.py",
    "server/text/stop_strings.py",
    "server/render/common.py",
    "server/render/chat.py",
    "server/http/sse.py",
)
"""A plain streamed chat request in the server process, in reading order."""

ENGINE_STEP = (
    "engine/loop/server_link.py",
    "engine/loop/engine.py",
    "engine/request.py",
    "engine/core/waiting_queue.py",
    "engine/schedule/scheduler.py",
    "engine/core/admission.py",
    "engine/schedule/step_budget.py",
    "engine/cache/manager.py",
    "engine/cache/block_pool.py",
    "engine/schedule/batch_builder.py",
    "engine/step/batch.py",
    "engine/step/executor.py",
    "engine/runner/model_runner.py",
    "engine/models/decoder.py",
    "engine/layers/block.py",
    "engine/layers/parts.py",
    "engine/layers/attention.py",
    "engine/sampling/sampler.py",
    "engine/sampling/random.py",
    "engine/step/step_result.py",
    "engine/core/output_collector.py",
)
"""A step of the engine process, in reading order."""

_SUFFIXES = {".py", ".c", ".h", ".js", ".css"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def render_modules(root: Path) -> str:
    """Return the list of modules by folder, as Markdown; links are relative to docs/."""
    lines = []
    for folder, purpose in FOLDERS.items():
        lines.append(f"\n### `{folder}/`\n\n{purpose}\n")
        for path in modules(root, folder):
            lines.append(f"- [`{path.name}`](../{folder}/{path.name}): {first_sentence(path)}")
    return "\n".join(lines).replace("\n\n\n", "\n\n").lstrip("\n") + "\n"


def render_reading_path(root: Path) -> str:
    """Return the reading path as two tables with lines of code, as Markdown."""
    parts, total = [], 0
    for title, path in (("A chat request", CHAT_REQUEST), ("An engine step", ENGINE_STEP)):
        counts = [code_lines((root / name).read_text(encoding="utf-8")) for name in path]
        rows = [f"| {i} | [`{path[i - 1]}`](../{path[i - 1]}) | {count} |" for i, count in enumerate(counts, 1)]
        head = f"**{title}**: {sum(counts):,} lines of code\n\n| | file | lines |\n|---:|---|---:|\n"
        parts.append(head + "\n".join(rows) + "\n")
        total += sum(counts)
    return "\n".join([*parts, f"Together {total:,} lines of code, without blank lines, comments and docstrings.\n"])


def folders(root: Path) -> list[str]:
    """Return every folder of the two packages that holds a module, relative to the root."""
    return sorted(
        {
            path.parent.relative_to(root).as_posix()
            for package in ("server", "engine")
            for path in (root / package).rglob("*")
            if path.suffix in _SUFFIXES and path.name != "__init__.py"
        }
    )


def modules(root: Path, folder: str) -> list[Path]:
    """Return the modules of a folder by name, without those of its subfolders and without `__init__.py`."""
    return sorted(path for path in (root / folder).iterdir() if path.suffix in _SUFFIXES and path.name != "__init__.py")


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring or opening comment.

    Raises:
        ValueError: It has neither.
    """
    source = path.read_text(encoding="utf-8")
    text = (ast.get_docstring(ast.parse(source)) or "") if path.suffix == ".py" else _opening_comment(source)
    paragraph = " ".join(text.split("\n\n")[0].split())
    if not paragraph:
        raise ValueError(f"{path} does not begin with a sentence that says what it is for")
    return re.split(r"(?<=\.) (?=[A-Z`/])", paragraph)[0]


def _opening_comment(source: str) -> str:
    if source.startswith("/*"):
        lines = source[2 : source.index("*/")].splitlines()
        return "\n".join(re.sub(r"^\s*\*? ?", "", line) for line in lines)
    lines = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return "\n".join(lines)


def code_lines(source: str) -> int:
    """Count the lines of Python source without blank lines, comments and docstrings."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)
