"""What docs/structure.md says of the tree: a line for each folder, and the reading path with its length.

What a module is for is the first sentence of its docstring, or of the comment that opens a C or JavaScript file.
"""

import ast
import gzip
import io
import re
import tokenize
from pathlib import Path

FOLDERS = {
    "server": "The way into the `weft` command, settings and errors. `demo_model/` holds the bundled weights.",
    "server/text": "Chat template, tokenizer, detokenizer, stop strings.",
    "server/pictures": "From a part of a message to what a model sees: where a picture is, how it is fetched and read.",
    "server/library": "Models that were fetched: names, downloads, what is there.",
    "server/json_schema": "Loosens tools' JSON schemas until a grammar can enforce them, and tells what was left out.",
    "server/formats": "How models write reasoning and tool calls: one file for each family of formats.",
    "server/formats/families": "Formats that are like no other family's: Gemma 4, MiniMax M3, functionary.",
    "server/models": "A served model: the client of its engine, its formats, its default sampling.",
    "server/store": "What outlives a request: a bounded database and files, shared by all server processes.",
    "server/http": "HTTP apart from any API: connections, access, streams, metrics, what every route shares.",
    "server/task": "From a checked body to a task, independent of the API; wire types and readers that APIs share.",
    "server/generate": "From a task to typed events: prompts, plan, choices, their parsing.",
    "server/speech": "From a file of sound to segments of text: its decoding, windows, subtitles.",
    "server/apis/openai": "Completions, chat, tokens, and the list of models.",
    "server/apis/responses": "Responses and conversations, what is stored of them, and the tools of MCP servers.",
    "server/apis/anthropic": "Anthropic's messages.",
    "server/apis/ollama": "Ollama's routes.",
    "server/apis/llama_cpp": "The routes of llama.cpp's server.",
    "server/apis/vectors": "Embeddings, scores, reranking, classes.",
    "server/apis/speech": "Transcriptions and translations.",
    "server/apis/decisions": "Decisions: probabilities of given answers.",
    "server/apis/batches": "Files and batches: checks of lines, the journal of results, and the task that runs them.",
    "server/apis/admin": "Health, metrics, the chat page and its files, documentation, models and adapters.",
    "server/supervise": "Processes: the supervisor, what it starts and watches, and where they find the model.",
    "server/app": "The server process, its application, and the process of batches.",
    "server/ray": "Weft on Ray Serve, and which replica a request goes to.",
    "server/cli": "The `weft` command and what it shows.",
    "server/chat_page": "The chat page: `index.html`, a style sheet and JavaScript modules, served as they are.",
    "server/chat_page/vendor": "Libraries of the chat page, fetched by `python -m docs.vendor`.",
    "engine": "What stands alone: the request, a step's batch, settled options, division of memory, the process.",
    "engine/wire": "What both sides share: messages, sampling parameters, options, status page, tokenizer files.",
    "engine/guidance": "Grammars and reasoning budgets: what may be sampled next, and what must be.",
    "engine/sampling": "Logits to ids and log-probabilities: penalties, masks, filters, the draw; rows to vectors.",
    "engine/cache": "The KV cache as block ids: specs, lookup, allocation, eviction, pins, offload.",
    "engine/schedule": "Who computes how much in a step: queue, scheduler, admission, budgets, drafts.",
    "engine/loop": "The step: accept, launch, collect, and the link to the servers.",
    "engine/weights": "From a checkpoint to tensors: references, the reader, quantized methods, upload.",
    "engine/gguf": "GGUF files as folders in Hugging Face layout.",
    "engine/families": "From `config.json` to switches, as data: one function for each family of models.",
    "engine/layers": "Blocks, their layers, and the seams to kernels and attention.",
    "engine/describe": "A decoder's configuration, what layers need of caches and tensors, and how ranks divide them.",
    "engine/parts": "Each unusual part of a model whole: its layers, how they are built, and how ranks divide them.",
    "engine/vision": "Pictures: how a checkpoint sees, their features, and how these get into a step.",
    "engine/models": "From a checkpoint to a decoder, its cuts for ranks and stages, and heads that draft for it.",
    "engine/lora": "Low-rank adapters (LoRA): their files, where they act in a model, and the rows that use them.",
    "engine/kernels": "Which kernels compute a model, and experts that the CPU computes beside a GPU.",
    "engine/kernels/torch": "Plain torch: the reference for tests, and what runs where nothing faster does.",
    "engine/kernels/cpu": "Weft's own kernels for bfloat16 on x86-64: how they are compiled, and who calls them.",
    "engine/kernels/cpu/c": "The kernels, in C.",
    "engine/kernels/cpu/c/include": "What these share.",
    "engine/kernels/triton": "Weft's own kernels for CUDA, in Triton: `X.py` calls `X_jit.py`.",
    "engine/runner": "Runs batches: the model runner, CUDA graphs.",
    "engine/fallback": "Transformers' own modules over Weft's cache, for architectures without a family.",
    "engine/ranks": "Several processes and machines that compute one model.",
    "engine/tune": "Kernels compared at start-up, and the file of what was chosen.",
    "engine/start": "From options to a first step.",
}
"""What each folder is for, in the order of the page."""

CHAT_REQUEST = (
    "server/apis/openai/chat.py",
    "server/task/body.py",
    "server/task/read_body.py",
    "server/task/task.py",
    "server/task/messages.py",
    "server/text/chat_template.py",
    "server/text/tokenizer.py",
    "server/generate/pipeline.py",
    "server/generate/prompts.py",
    "server/generate/answer.py",
    "server/models/engine_client.py",
    "engine/wire/messages.py",
    "engine/wire/params.py",
    "server/generate/choice_stream.py",
    "server/generate/events.py",
    "server/text/detokenizer.py",
    "server/apis/openai/render.py",
    "server/http/sse.py",
)
"""A plain streamed chat request in the server process, in reading order."""

ENGINE_STEP = (
    "engine/loop/server_link.py",
    "engine/loop/engine.py",
    "engine/request.py",
    "engine/schedule/waiting_queue.py",
    "engine/schedule/scheduler.py",
    "engine/schedule/step_budget.py",
    "engine/cache/manager.py",
    "engine/cache/block_pool.py",
    "engine/schedule/batch_builder.py",
    "engine/batch.py",
    "engine/runner/model_runner.py",
    "engine/layers/block.py",
    "engine/sampling/sampler.py",
    "engine/loop/output_collector.py",
)
"""A step of the engine process, in reading order."""

_SUFFIXES = {".py", ".c", ".h", ".js", ".css", ".gz"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def render_folders(root: Path) -> str:
    """Return what each folder is for and holds, as a Markdown table; links are relative to docs/."""
    rows = []
    for folder, purpose in FOLDERS.items():
        names = ", ".join(dict.fromkeys(path.stem for path in modules(root, folder)))
        rows.append(f"| [`{folder}`](../{folder}) | {purpose} | `{names}` |")
    return "\n".join(["| folder | for | files |", "|---|---|---|", *rows]) + "\n"


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
    data = path.read_bytes()
    source = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
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
