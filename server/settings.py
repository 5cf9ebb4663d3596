"""Every flag, environment variable and YAML key, in one frozen model.

Owns names, defaults, bounds and meaning of the settings; `server/resolve.py` reads them. With "auto" and None the
engine decides. Holds secrets: never print a `Settings`; `server/cli/tables.py` shows one without them.
"""

import difflib
import json
import pathlib
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.options import MAX_ADAPTERS, MAX_FOLDER_CHARS, MAX_LORAS, KvRole
from weft.server.model_entry import ModelEntries, ModelEntry, ModelName, check_names
from weft.server.sampling import SamplingDefaults

_DEFAULT_LORAS = 16
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


EVERYBODY = "*"
"""In `priority_keys`: every client, with or without a key."""


class StartError(Exception):
    """Weft cannot start with these settings; the message is one line that names the fault. Exit code 2."""


def _parse_size(value: object) -> object:
    """4GiB, 512MB or plain bytes -> bytes. Leaves values that are not text to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("input should be a size such as 4GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _split_names(value: object) -> object:
    """Text with commas (environment, YAML) -> names. Refuses an empty name."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list):
        names = [name.strip() if isinstance(name, str) else name for name in names]
        if "" in names:
            raise ValueError("input should not be empty")
    return names


def _split_choices(value: object) -> object:
    """Text such as a=x,b=y (environment, YAML) -> mapping; numbers in a mapping become text."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",")]
        if not all(name.strip() and sign and choice.strip() for name, sign, choice in pairs):
            raise ValueError("input should be of the form component=candidate, with commas between several")
        return {name.strip(): choice.strip() for name, _, choice in pairs}
    if isinstance(value, dict):
        return {name: str(choice) if isinstance(choice, int) else choice for name, choice in value.items()}
    return value


def _read_loras(value: object) -> object:
    """Flags such as name=path, text such as a=x,b=y, or JSON -> mapping."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("{") else value.split(",")
    if not isinstance(value, list):
        return value
    pairs = [str(pair).partition("=") for pair in value]
    if not all(sign and folder.strip() for _, sign, folder in pairs):
        raise ValueError("input should be of the form name=folder, or name=hub id")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"input should have each name once, got {twice} twice")
    return dict(zip(names, (folder.strip() for _, _, folder in pairs), strict=True))


def _read_servers(value: object) -> object:
    """Text such as label=url,label=url, or JSON -> mapping; a server may be its URL alone."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("{") else _split_choices(value)
    if isinstance(value, dict):
        return {label: {"url": server} if isinstance(server, str) else server for label, server in value.items()}
    return value


def _each(pattern: str, meaning: str) -> AfterValidator:
    """A validator that refuses names that do not match the pattern."""

    def check(names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(pattern, name) for name in names):
            raise ValueError(f"input should be {meaning}")
        return names

    return AfterValidator(check)


# fmt: off
ToolFormatName = Literal[
    "auto", "hermes", "llama3_json", "llama4_json", "mistral", "deepseek_v3", "deepseek_v31", "granite", "phi4",
    "kimi_k2", "cohere", "nemotron", "hunyuan", "apertus", "qwen3_coder", "glm", "seed", "minimax_m2", "step3",
    "pythonic", "lfm2", "olmo3", "harmony", "minicpm", "hy3", "deepseek_v32", "deepseek_v4", "kimi_k3", "gemma4",
    "minimax_m3", "functionary", "functionary31", "gigachat3", "minimax_m1", "command_r_plus", "solar",
]
# fmt: on
Size = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]
Choices = Annotated[dict[str, str], BeforeValidator(_split_choices)]
Loras = Annotated[
    dict[ModelName, Annotated[str, Field(min_length=1, max_length=MAX_FOLDER_CHARS)]],
    BeforeValidator(_read_loras),
    Field(max_length=MAX_ADAPTERS),
]
Hosts = Annotated[Names, _each(r"\*|[^*/@\s]+", "* or names such as llm.example.com")]
Origins = Annotated[
    Names, _each(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s*A-Z]+", "* or origins such as https://chat.example.com:8443")
]


PrefillUrls = Annotated[Names, _each(r"https?://[^\s/?#@]+(/[^\s?#]*)?", "URLs such as http://prefill:8000")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
HeaderValue = Annotated[str, Field(pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$", max_length=8192)]


class McpServer(BaseModel):
    """A server of tools that requests may use, and the headers that it is sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s/?#@]+([/?][^\s#]*)?$")
    headers: dict[HeaderName, HeaderValue] = Field(default={}, repr=False)


McpServers = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], McpServer], BeforeValidator(_read_servers)
]


class Settings(BaseModel):
    """The operator's decisions. A field is a YAML key, and in capitals after WEFT_ an environment variable.

    The text below a field is its description, in the help of its flag and in the documentation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str | None = None
    """Checkpoint: a local folder in Hugging Face layout, a GGUF file, its address, a hub id, or a name that `weft pull`
    lists. Default: the demo model."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means every interface."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    ssl_certfile: str | None = None
    """PEM file with the certificate, and those of its issuers: the server then speaks HTTPS alone. A file that is
    replaced is used from the next connection on. Needs ssl_keyfile. Default: HTTP."""
    ssl_keyfile: str | None = None
    """PEM file with the certificate's private key, which must not be encrypted. Needs ssl_certfile."""
    served_model_name: Names = ()
    """Name of the model in the API; repeat it for aliases. Default: the hub id, or the folder's or file's name."""
    models: ModelEntries = {}
    """Several models in place of MODEL, as a mapping in YAML or JSON of names to checkpoints, or to `model`, `aliases`,
    `load` (always, on-demand), `unload_after` in seconds, and settings of its own. The first one serves requests that
    name none."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a request may wait for a model that is loaded on demand; beyond it the answer is 503."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of weights and activations; auto follows the checkpoint and the device."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of prompt and output together. Default: the checkpoint's limit."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum requests that run at once. Default: depends on the device."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens in one step. Default: depends on the device."""
    kv_cache_memory: Size | None = None
    """Memory for the KV cache (4GiB, 512MB, bytes). Default: a share of the free memory."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Data type of the KV cache; auto: the model's. Half as large as 16 bits: fp8 (e4m3) on CUDA, int8 on a CPU."""
    kernels: Choices = {}
    """What computes a part of the model, as component=candidate with commas, or a mapping in YAML. Components are
    attention, layers, sampler and threads on a CPU, and decode_attention, prefill_attention, norm_and_activation,
    few_row_products, packed_products, experts, adapters, launches and sampler on CUDA. Default: the fastest candidate
    that computes what torch computes, by comparison at the first start; `weft doctor` lists them."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens per block of the KV cache. Default: 16 on CUDA, 32 on a CPU."""
    prefix_caching: bool = True
    """Let requests share the KV blocks of equal prefixes."""
    kv_offload: Annotated[int, BeforeValidator(_parse_size), Field(ge=0)] = 0
    """Memory of the host for blocks that fall out of the KV cache of a GPU (32GiB, bytes); they come back when a prompt
    begins with them. 0: none."""
    kv_offload_dir: str | None = None
    """Folder in which blocks that fall out of the KV cache are kept, beyond a restart. It holds what models made of
    prompts: give it to nobody else. Default: none."""
    kv_offload_disk: Size = 32 << 30
    """Maximum bytes in kv_offload_dir for a model; then the least recently used go."""
    kv_role: KvRole = "none"
    """Share kv_offload_dir with other servers of the model: each finds the blocks of all. prefill writes every prompt
    before it answers, the others on request (kv_transfer_params). decode loads blocks even if computing them is faster,
    since that would delay its streams. none: the folder is this server's own."""
    prefill_urls: PrefillUrls = ()
    """Servers with the kv_role prefill or both, such as http://prefill:8000, which compute long prompts for this one.
    It loads what they wrote, and computes a prompt itself if they fail. They are sent the first api_key. Needs the
    kv_role decode or both."""
    prefill_min_tokens: int = Field(default=512, ge=1)
    """Tokens of a prompt that are new to this server from which it is computed at prefill_urls."""
    prefill_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a prompt may take there; beyond it this server computes it."""
    load_format: Literal["auto", "dummy"] = "auto"
    """How to load weights; dummy makes random ones."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """What computes the model: Weft's own layers (native) or transformers' module over Weft's cache; auto: native for
    an architecture that has a family."""
    task: Literal["auto", "generate", "embed", "classify"] = "auto"
    """What the model is for: text, or vectors (embeddings, or scores of a classifier or reranker); auto: as its
    architecture and modules.json say."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Of which hidden states a vector is made: of the last token, the mean, or of the first; auto: as the checkpoint
    says, else last."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """How to store matrices: int8, and on CUDA fp8, halve the bytes that are read for each token, int4 takes less than
    a third."""
    host_expert_layers: int | None = Field(default=None, ge=0)
    """Number of layers whose experts stay in the memory of the host, where the CPU computes them, for a mixture of
    experts that does not fit the GPU; the first layers that have any. Slower. 0: none. Default: as few as it takes for
    the model to fit, none if it fits."""
    pictures: bool = True
    """Whether a model that sees is shown the pictures of messages; false: its text half is served alone, in less
    memory."""
    mmproj: str | None = None
    """File of what sees (mmproj-*.gguf of llama.cpp) for a model that is a GGUF file. Needs pictures. Default: the one
    in the model's folder whose name says that it goes with the model, if there is one."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Number of processes that compute each step together, each with a part of every layer: on CUDA one for each GPU,
    on a CPU each with its share of the cores. kv_cache_memory is then that of each."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Number of stages, each with some of the layers and tensor_parallel_size processes, which compute a step one after
    the other: more memory, not more speed."""
    nnodes: int = Field(default=1, ge=1, le=64)
    """Number of machines that compute the model, each with as many of the processes. Each runs the same command with
    its own node_rank; the first serves HTTP, the others follow it."""
    node_rank: int = Field(default=0, ge=0, le=63)
    """Which of the machines this is, from 0."""
    master_addr: str | None = None
    """Address of the first machine, at which the others join it. Only they should reach it."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port of master_addr; open while a machine is missing. The processes also meet at ports that they choose."""
    nodes_token: str | None = Field(default=None, min_length=16, repr=False)
    """Secret by which the machines know each other, such as the output of `openssl rand -hex 32`; it is never sent."""
    lora: Loras = {}
    """LoRA adapters of the model, each a name in the API and a folder as PEFT writes it, or a hub id: name=folder, or a
    mapping in YAML or JSON; repeat the flag for several."""
    max_loras: int | None = Field(default=None, ge=0, le=MAX_LORAS)
    """Adapters that may be used at the same time, for which memory is kept; further ones take their place when they are
    asked for. Default: as many as lora has, at most 16."""
    max_lora_rank: int = Field(default=64, ge=1, le=512)
    """Largest rank of an adapter; memory is kept for it."""
    lora_modules_to_save: int = Field(default=0, ge=0, le=MAX_LORAS)
    """How many of max_loras may be adapters with an embedding or an output head of their own (`modules_to_save` of
    PEFT); memory for whole matrices is kept for them."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls; auto detects it from the chat template."""
    chat_template: str | None = None
    """File with a chat template (Jinja), in place of the checkpoint's."""
    default_sampling: SamplingDefaults = {}
    """How to sample where a request does not say, as temperature=0.7,top_p=0.9, or a mapping in YAML: temperature,
    top_p, top_k, min_p and repetition_penalty. Default: as the checkpoint says."""
    speculative: str | None = None
    """Speculative decoding: faster, with the same answers. ngram guesses tokens that repeat earlier text; mtp lets the
    checkpoint's own head guess; a folder or hub id names a smaller model with the same vocabulary, or an EAGLE-3
    head for the model."""
    itl_target_ms: float | None = Field(default=None, gt=0)
    """Maximum milliseconds between two tokens of a stream while other prompts are prefilled; on CUDA also of a step of
    prompts alone, since a new request may wait for two. Default: 50 on CUDA; on a CPU, and with experts in host memory,
    1.8 times the time without prefill, or 500 while at least as many prompts wait as streams run, and never more than
    500 unless one block of a prompt takes longer."""
    deterministic: bool = False
    """Make answers bit-identical whatever other requests run, at a cost in speed. On a CPU Weft's own kernels always do
    so."""
    api_key: Names = Field(default=(), repr=False)
    """Key that clients must send; repeat it for several. Without one, everybody may send requests."""
    admin_key: Names = Field(default=(), repr=False)
    """Key with which models may be loaded, unloaded and renamed, and adapters loaded and unloaded; repeat it for
    several. Without one, nobody may."""
    api_keys_file: str | None = None
    """File with more API keys, one per line; empty lines and lines that begin with # are ignored."""
    api_pulls: bool | None = None
    """Whether clients may fetch models of the hub and remove them (Ollama's /api/pull and /api/delete), and see what is
    in the library. Default: only on a loopback address, without api_key, allowed_hosts and cors_origins."""
    priority_keys: Names = Field(default=(), repr=False)
    """API keys whose requests may use the service tier priority (or fast) and a negative priority; `*` allows
    everybody. All other requests are served in the tier default."""
    allowed_hosts: Hosts = ()
    """Host names that requests may use for the server (Host), besides loopback names and host; * for any. Default: Host
    is checked only if no key is set and host is a loopback address."""
    cors_origins: Origins = ()
    """Origins of web pages that may use the server from a browser, such as https://chat.example.com; * for any."""
    server_processes: int = Field(default=1, ge=1, le=64)
    """Number of processes that serve HTTP."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""
    strict_params: bool = False
    """Refuse unknown request fields with 400 instead of listing them in x-ignored-params."""
    any_model_name: bool = False
    """Accept any model name in requests."""
    max_n: int = Field(default=32, ge=1, le=1024)
    """Maximum choices (n, best_of) of one request."""
    max_num_waiting: int = Field(default=1024, ge=1)
    """Maximum waiting requests; beyond it the answer is 503."""
    max_body_bytes: Size = 32 << 20
    """Maximum bytes of a request body; beyond it the answer is 413."""
    max_audio_s: float = Field(default=7200.0, gt=0)
    """Maximum seconds of sound in a file that is to become text; beyond it the answer is 413."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds for the headers of a request to arrive; beyond it the answer is 408."""
    body_pause_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a body may pause while it arrives; beyond it the answer is 408."""
    body_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds for a whole body to arrive; beyond it the answer is 408."""
    max_connections: int | None = Field(default=None, ge=1)
    """Maximum open connections of a server process; beyond it the answer is 503, except to probes. Default: three
    quarters of the file limit, which is also the upper bound."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests may take to finish after SIGTERM."""
    pin_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the KV cache that prompt_cache_breakpoint may pin."""
    decision_refusal_below: float = Field(default=0.0, ge=0, le=1)
    """Refuse a question of /v1/decisions if its labels have less probability than this together."""
    metrics_auth: bool = False
    """Require an API key for /metrics."""
    metrics_prefix: Literal["weft", "vllm"] = "weft"
    """What names of metrics begin with. With vllm, what reads the metrics of vLLM reads these: dashboards, KEDA,
    the endpoint pickers of Kubernetes' gateways."""
    kv_events: str | None = Field(default=None, pattern=r"^(tcp|ipc)://\S+$")
    """ZeroMQ address at which the engine publishes which blocks it has cached, in vLLM's format, such as tcp://*:5557.
    The messages hold the prompts as token ids: let only the router reach it. Default: none."""
    kv_events_topic: str | None = None
    """Topic of these messages. Default: kv@HOST@MODEL, of this machine's name and the model's first name."""
    kv_events_replay: str | None = Field(default=None, pattern=r"^(tcp|ipc)://\S+$")
    """ZeroMQ address at which a subscriber of kv_events can ask for messages that it missed, such as tcp://*:5558.
    Default: none."""
    kv_events_buffer: int = Field(default=10_000, ge=1, le=1_000_000)
    """Maximum messages that are kept for kv_events_replay, in at most 64 MiB."""
    stall_timeout_s: float = Field(default=120.0, ge=0)
    """Upper bound on the seconds without a sign of life after which the engine is killed and restarted. The bound of a
    step is ten times its predicted time, but at least 10 s, or 30 s on CUDA. All of them are up to ten times as long
    while the engine's threads wait for a core or the disk. 0: never."""
    data_dir: str | None = None
    """Folder for files, batches, stored responses and conversations, which outlive the server in it. Default: a
    temporary folder, which ends with the server."""
    store_max_objects: int = Field(default=100_000, ge=1)
    """Maximum stored responses and other objects; then the oldest of the API key that has most are removed."""
    store_max_bytes: Size = 1 << 30
    """Maximum bytes of stored responses and other objects, files not counted."""
    store_max_age_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds after which a stored object without changes is removed."""
    max_file_bytes: Size = 512 << 20
    """Maximum bytes of an uploaded file; beyond it the answer is 413."""
    files_max_bytes: Size = 10 << 30
    """Maximum bytes of all files together; beyond it the answer is 507."""
    files_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of files_max_bytes, and of the number of files, that one of several API keys may take."""
    batch_lines: int = Field(default=16, ge=1, le=1024)
    """Lines of a batch that run at once, while no other requests do."""
    image_hosts: Annotated[Names, _each(r"[^*/@:\s]+(:\d+)?", "names such as images.example.com")] = ()
    """Hosts from which pictures in messages may be fetched over https, with commas or as a list: a name, with a port if
    it is not 443. No other host is ever asked, nor an address that is not public."""
    mcp_servers: McpServers = Field(default={}, repr=False)
    """MCP servers whose tools /v1/responses may call, as label=url with commas, or a mapping in YAML or JSON of labels
    to a url, or to `url` and `headers`. No other address is ever connected to."""
    mcp_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds for an MCP server to list its tools or to answer a call."""
    mcp_max_bytes: Size = 1 << 20
    """Maximum bytes of an MCP server's list of tools, and of the result of a call."""
    mcp_max_calls: int = Field(default=32, ge=1, le=1024)
    """Maximum calls of MCP tools in one response; max_tool_calls may be less."""
    sse_ping_s: float = Field(default=50.0, ge=0)
    """Seconds of silence in a stream before a keep-alive comment; 0: none."""

    @field_validator("models")
    @classmethod
    def _check_models(cls, entries: dict[str, ModelEntry]) -> dict[str, ModelEntry]:
        check_names(entries)
        for name, entry in entries.items():
            for key in entry.own:
                if key not in OF_A_MODEL:
                    whole = " of a model, but of the whole server" * (key in FIELDS)
                    raise ValueError(f"{name}: no such setting{whole}: {key}{suggest(key, str, OF_A_MODEL)}")
            try:
                cls.model_validate(dict(entry.own))
            except ValidationError as error:
                raise ValueError(f"{name}.{error.errors()[0]['loc'][0]}: {fault(error)}") from None
        return entries

    @property
    def fleet(self) -> Mapping[str, ModelEntry]:
        """The served models by their own names: `models`, or the one that `model` and `served_model_name` describe."""
        if self.models:
            return self.models
        name, *aliases = self.served_model_name
        return {name: ModelEntry.model_construct(model=self.model, aliases=tuple(aliases))}

    @property
    def names(self) -> list[str]:
        """Every name of every model at the start."""
        return [each for name, entry in self.fleet.items() for each in (name, *entry.aliases)]

    @property
    def num_lora_slots(self) -> int:
        """How many adapters of the one model may be used at once."""
        return min(len(self.lora), _DEFAULT_LORAS) if self.max_loras is None else self.max_loras

    def for_model(self, name: str) -> "Settings":
        """These settings as if that model of the fleet were the only one."""
        entry = self.fleet[name]
        told = {**self.model_dump(), **entry.own}
        names = (name, *entry.aliases)
        topic = told["kv_events_topic"] or f"kv@{socket.gethostname()}@{name}"
        told |= {"model": entry.model, "served_model_name": names, "models": {}, "kv_events_topic": topic}
        return Settings.model_validate(told)


FLAGS = (
    *("host", "port", "served_model_name", "device", "dtype", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "kv_cache_memory", "kv_cache_dtype", "kv_offload", "block_size", "prefix_caching"),
    *("load_format", "quantization", "mmproj", "tool_format", "chat_template", "default_sampling", "speculative"),
    *("itl_target_ms", "deterministic", "api_key", "api_keys_file", "server_processes", "tensor_parallel_size"),
    *("data_dir", "task", "lora", "log_format"),
)
"""The settings with a flag, in the order of the help text. The others are for YAML and environment only."""

_OF_NODES = frozenset({"nnodes", "node_rank", "master_addr", "master_port", "nodes_token"})
_OF_TEXT = frozenset({"mmproj", "tool_format", "chat_template", "default_sampling"})
OF_A_MODEL = frozenset(EngineOptions.__struct_fields__) - {"model", "log_format"} - _OF_NODES | _OF_TEXT
"""The settings that each of several models may have for itself."""

SECRETS = frozenset({"api_key", "admin_key", "priority_keys", "mcp_servers", "nodes_token"})
SIZES = frozenset({"kv_cache_memory", "kv_offload", "kv_offload_disk", "max_body_bytes", "store_max_bytes"}) | {
    "max_file_bytes",
    "files_max_bytes",
    "mcp_max_bytes",
}
"""The settings in bytes; they accept a unit."""

FIELDS = Settings.model_fields
for _field in FIELDS.values():
    _field.description = " ".join((_field.description or "").split())


def flag_name(name: str) -> str:
    """The flag of a setting in FLAGS. A setting that is on by default has a flag that turns it off."""
    return ("--no-" if FIELDS[name].default is True else "--") + name.replace("_", "-")


def fault(error: ValidationError) -> str:
    """What is wrong with a value, and the value unless it is secret; of one within `models` also where."""
    first = error.errors()[0]
    name, *path = map(str, first["loc"])
    told = first["msg"].removeprefix("Value error, ")
    if name == "models":
        told = f"{'.'.join([name, *path])}: {told[0].lower()}{told[1:]}"
    shown = "" if name in SECRETS or (name == "models" and not path) else f", got {first['input']!r}"
    return f"{told[0].lower()}{told[1:]}{shown}"


def suggest(name: str, spell: Callable[[str], str], known: Iterable[str] = FIELDS) -> str:
    """A known name that is close to one that is not, behind a message; nothing if none is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {spell(close[0])}?)" if close else ""


def engine_options(settings: Settings, model: pathlib.Path) -> EngineOptions:
    """The engine's share of the settings, by name. `model` is the resolved checkpoint folder."""
    told = {name: getattr(settings, name) for name in set(EngineOptions.__struct_fields__) - {"model"}}
    return EngineOptions(model=str(model), **told | {"max_loras": settings.num_lora_slots})
