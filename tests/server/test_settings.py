import ast
import pathlib

import msgspec
import pytest

from weft import server
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.wire.messages import EngineOptions
from weft.server import settings as settings_module
from weft.server.cli.tables import describe
from weft.server.resolve import check_meeting, resolve
from weft.server.settings import FLAGS, Settings, StartError, engine_options, flag_name

DEMO = pathlib.Path(server.__file__).parent / "demo_model"


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "weft.yaml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: pathlib.Path) -> None:
    config = write(tmp_path, "port: 1\nhost: file\ndevice: cuda\n")
    resolved = resolve({"port": "3"}, {"WEFT_PORT": "2", "WEFT_HOST": "env", "PATH": "/bin"}, config)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.port, origins["port"]) == (3, "--port")
    assert (settings.host, origins["host"]) == ("env", "WEFT_HOST")
    assert (settings.device, origins["device"]) == ("cuda", f"{config}:3")
    assert (settings.dtype, origins["dtype"]) == ("auto", "default")


def test_file_may_be_named_by_the_environment_and_use_dashes(tmp_path: pathlib.Path) -> None:
    config = write(tmp_path, "# comment\nmax-model-len: 64\nstrict_params: true\nkv_cache_memory: 2GiB\nhost:\n")
    settings = resolve({}, {"WEFT_CONFIG": str(config)}).settings
    assert (settings.max_model_len, settings.strict_params, settings.kv_cache_memory) == (64, True, 2 << 30)
    assert settings.host == "127.0.0.1"  # a key without a value is not set


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5 KiB", 1536), ("123", 123), ("7b", 7), ("2gb", 2 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert resolve({"kv_cache_memory": text}, {}).settings.kv_cache_memory == num_bytes


def test_names_repeat_as_flags_and_have_commas_in_the_environment() -> None:
    assert resolve({"api_key": ["a,b", "c"]}, {}).settings.api_key == ("a,b", "c")
    assert resolve({}, {"WEFT_API_KEY": "a, b"}).settings.api_key == ("a", "b")
    assert resolve({}, {"WEFT_SERVED_MODEL_NAME": ""}).settings.served_model_name == ()


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "70000"}, {}, "--port: input should be less than or equal to 65535, got '70000'"),
        ({"device": "gpu"}, {}, "--device: input should be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({}, {"WEFT_MAX_N": "0"}, "WEFT_MAX_N: input should be greater than or equal to 1, got '0'"),
        ({}, {"WEFT_PROT": "1"}, "WEFT_PROT: no such setting (did you mean WEFT_PORT?)"),
        ({}, {"WEFT_QQQQQQ": ""}, "WEFT_QQQQQQ: no such setting"),
        ({"api_key": [""]}, {}, "--api-key: input should not be empty"),
        ({}, {"WEFT_API_KEY": ""}, "WEFT_API_KEY: input should not be empty"),
        ({}, {"WEFT_API_KEYS_FILE": ""}, "WEFT_API_KEYS_FILE: input should not be empty"),
        ({"api_keys_file": ""}, {}, "--api-keys-file: input should not be empty"),
        ({}, {"WEFT_NODE_RANK": "1"}, "WEFT_NODE_RANK: must be less than nnodes, 1, got 1"),
        (
            {},
            {"WEFT_NNODES": "2"},
            "WEFT_NNODES: must divide tensor_parallel_size times pipeline_parallel_size, 1, got 2",
        ),
        ({}, {"WEFT_NODES_TOKEN": ""}, "WEFT_NODES_TOKEN: input should not be empty"),
        ({}, {"WEFT_NODES_TOKEN": "short"}, "WEFT_NODES_TOKEN: string should have at least 16 characters"),
        ({}, {"WEFT_KV_EVENTS_REPLAY": "tcp://*:1"}, "WEFT_KV_EVENTS_REPLAY: kv_events_replay needs kv_events"),
        ({"api_keys_file": "/none"}, {}, "--api-keys-file: /none cannot be read: No such file or directory"),
        (
            {},
            {"WEFT_CORS_ORIGINS": "https://a/"},
            "WEFT_CORS_ORIGINS: input should be * or origins such as https://chat.example.com:8443, got 'https://a/'",
        ),
        (
            {},
            {"WEFT_ALLOWED_HOSTS": "a,*.b"},
            "WEFT_ALLOWED_HOSTS: input should be * or names such as llm.example.com, got 'a,*.b'",
        ),
        (
            {"kv_cache_memory": "4 bananas"},
            {},
            "--kv-cache-memory: input should be a size such as 4GiB, 512MB or a number of bytes, got '4 bananas'",
        ),
    ],
)
def test_fault_names_where_and_what(flags: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartError) as caught:
        resolve(flags, environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host: a\nprot: 1\n", "{}:2: no such setting: prot (did you mean port?)"),
        (
            "port: many\n",
            "{}:1: port: input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
        ("port: 1\napi_key:\n", "{}:2: api_key: input should not be empty"),
        ("api_key: []\n", "{}:1: api_key: input should not be empty"),
        ("host: a\nnode_rank: 1\n", "{}:2: node_rank: must be less than nnodes, 1, got 1"),
        ("host: a\nport: 1\nhost: b\n", "{}:3: host stands in line 1 as well"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "{}:2: max_num_seqs stands in line 1 as well"),
        ("models:\n  a-b: {model: x}\n  a_b: {model: y}\n  a-b: {model: z}\n", "{}:4: a-b stands in line 2 as well"),
        ("{port: 1, port: 1}", "{}:1: port stands in line 1 as well"),
        ("lora: &a {x: *a}\n", "{}: a value holds itself, or is nested too deeply"),
        ("- a\n", "{}:1: expected lines of the form 'setting: value'"),
        ("host: [\n", "{}:2: expected the node content, but found '<stream end>'"),
    ],
)
def test_fault_in_the_file_names_its_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    config = write(tmp_path, text)
    with pytest.raises(StartError) as caught:
        resolve({}, {}, config)
    assert str(caught.value) == message.format(config)


def test_keys_may_stand_in_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the office\nfirst\n\n  second, with a comma  \n")
    resolved = resolve({"api_keys_file": str(file)}, {})
    assert resolved.settings.api_key == ("first", "second, with a comma")
    assert resolved.origins["api_key"] == "api_keys_file"
    resolved = resolve({"api_key": ["given"]}, {"WEFT_API_KEYS_FILE": str(file)})
    assert resolved.settings.api_key == ("given", "first", "second, with a comma")
    assert resolved.origins["api_key"] == "--api-key, api_keys_file"
    file.write_text("# none yet\n")
    with pytest.raises(StartError, match=f"^--api-keys-file: {file} holds no key$"):
        resolve({"api_keys_file": str(file)}, {})


def test_kernels_are_a_mapping_or_text(tmp_path: pathlib.Path) -> None:
    text = {"WEFT_KERNELS": "prefill_attention=flash2, threads = 1"}
    config = write(tmp_path, "kernels:\n  prefill_attention: flash2\n  threads: 1\n")
    for resolved in (resolve({}, text), resolve({}, {}, config)):
        assert resolved.settings.kernels == {"prefill_attention": "flash2", "threads": "1"}
        (line,) = (line for line in describe(resolved).splitlines() if line.startswith("kernels "))
        assert " prefill_attention=flash2, threads=1 " in line
    for value in ("flash2", "sampler=", "=torch", "sampler=torch,"):
        with pytest.raises(StartError, match=r"^WEFT_KERNELS: input should be of the form component=candidate, with"):
            resolve({}, {"WEFT_KERNELS": value})
    with pytest.raises(StartError, match=r"weft\.yaml:1: kernels: input should be a valid"):
        resolve({}, {}, write(tmp_path, "kernels: {sampler: [torch]}\n"))


def test_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StartError, match=r"none\.yaml: cannot be read: No such file"):
        resolve({}, {}, tmp_path / "none.yaml")


def test_a_bad_key_is_not_repeated(tmp_path: pathlib.Path) -> None:
    config = write(tmp_path, "api_key: [secret, 5]\n")
    with pytest.raises(StartError) as caught:
        resolve({}, {}, config)
    assert "secret" not in str(caught.value)
    assert "got" not in str(caught.value)
    assert "secret" not in repr(Settings(api_key=("secret",)))


def test_every_setting_survives_the_way_to_the_server_process() -> None:
    settings = resolve({"api_key": ["k"], "kv_cache_memory": "1GiB", "prefix_caching": False}, {}).settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_flags_are_spelled_as_settings() -> None:
    assert set(FLAGS) < set(Settings.model_fields)
    assert flag_name("max_model_len") == "--max-model-len"
    assert flag_name("prefix_caching") == "--no-prefix-caching"


TOLD_THE_ENGINE: dict[str, object] = {
    "device": "cuda",
    "dtype": "float16",
    "max_model_len": 99,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 55,
    "kv_cache_memory": 1024,
    "kv_offload": 2048,
    "kv_offload_dir": "kv",
    "kv_offload_disk": 4096,
    "kv_role": "both",
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_events_topic": "kv@a@b",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "kv_events_buffer": 77,
    "kv_cache_dtype": "fp8",
    "kernels": {"layers": "torch"},
    "block_size": 8,
    "prefix_caching": False,
    "pin_share": 0.75,
    "load_format": "dummy",
    "model_impl": "native",
    "quantization": "int8",
    "host_expert_layers": 4,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "nnodes": 2,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
    "master_port": 29501,
    "nodes_token": "sixteen letters!",
    "speculative": "ngram",
    "itl_target_ms": 70.0,
    "deterministic": True,
    "pictures": False,
    "max_num_waiting": 9,
    "stall_timeout_s": 7.5,
    "log_format": "json",
    "task": "embed",
    "pooling": "mean",
    "lora": {"a": "/a"},
    "max_loras": 3,
    "max_lora_rank": 8,
    "lora_modules_to_save": 2,
}


@pytest.mark.parametrize(("name", "value"), TOLD_THE_ENGINE.items())
def test_the_engine_is_told_a_setting_and_no_other_changes(name: str, value: object) -> None:
    usual = msgspec.structs.asdict(engine_options(Settings(), pathlib.Path("/m")))
    options = msgspec.structs.asdict(engine_options(Settings.model_validate({name: value}), pathlib.Path("/m")))
    follows = {"max_loras": 1} if name == "lora" else {}
    assert {key: told for key, told in options.items() if told != usual[key]} == {name: value} | follows


def test_every_option_of_the_engine_follows_a_setting() -> None:
    assert {*TOLD_THE_ENGINE, "model"} == set(EngineOptions.__struct_fields__)


def test_every_other_setting_is_read_by_the_server() -> None:
    """A setting that only this module and its table know has no effect."""
    read: set[str] = set()
    for path in pathlib.Path(server.__file__).parent.rglob("*.py"):
        if path.name not in ("settings.py", "settings_table.py"):
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    merged = {"api_keys_file"}  # into api_key
    assert set(Settings.model_fields) - set(TOLD_THE_ENGINE) - merged - read == set()


def test_a_key_that_goes_first_is_a_key(tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys").write_text("second\n")
    keys = {"WEFT_API_KEY": "first", "WEFT_API_KEYS_FILE": str(tmp_path / "keys")}
    for names in ("first,second", "*"):
        assert resolve({}, keys | {"WEFT_PRIORITY_KEYS": names}).settings.priority_keys == tuple(names.split(","))
    with pytest.raises(StartError, match="WEFT_PRIORITY_KEYS: every key must be one of api_key or api_keys_file"):
        resolve({}, keys | {"WEFT_PRIORITY_KEYS": "first,third"})


def test_machines_need_an_address_and_a_token() -> None:
    for given, lacking in (({}, "master_addr"), ({"master_addr": "10.0.0.1"}, "nodes_token")):
        with pytest.raises(StartError, match=f"^nnodes: 2 machines need {lacking}$"):
            check_meeting(Settings.model_validate({"nnodes": 2, "tensor_parallel_size": 2, **given}))


def test_adapters_are_a_mapping_in_every_place(tmp_path: pathlib.Path) -> None:
    expected = {"a": "/x=1", "b": "org/lora"}
    (tmp_path / "weft.yaml").write_text("lora:\n  a: /x=1\n  b: org/lora\n")
    for text in ("a=/x=1, b=org/lora", '{"a": "/x=1", "b": "org/lora"}'):
        assert resolve({}, {"WEFT_LORA": text}).settings.lora == expected
    assert resolve({}, {}, tmp_path / "weft.yaml").settings.lora == expected
    settings = resolve({"lora": ["a=/x=1", "b=org/lora"]}, {}).settings
    assert (settings.lora, settings.num_lora_slots) == (expected, 2)
    assert Settings(lora={f"n{i}": "/x" for i in range(99)}).num_lora_slots == 16
    assert Settings(lora=expected, max_loras=1).num_lora_slots == 1
    assert (Settings().num_lora_slots, Settings(max_loras=3).num_lora_slots) == (0, 3)
    several = Settings.model_validate({"models": {"m": {"lora": {"a": "/x"}}, "n": {"max_loras": 4}}})
    assert [several.for_model(name).num_lora_slots for name in "mn"] == [1, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora": ["a"]}, "--lora: input should be of the form name=folder, or name=hub id"),
        ({"lora": ["a="]}, "--lora: input should be of the form name=folder, or name=hub id"),
        ({"lora": ["=/x"]}, "--lora: string should match pattern"),
        ({"lora": ["a,b=/x"]}, "--lora: string should match pattern"),
        ({"lora": [f"{'n' * 201}=/x"]}, "--lora: string should have at most 200 characters"),
        ({"lora": ["a=/x", "a=/y"]}, "--lora: input should have each name once, got a twice"),
        ({"lora": {"a": 1}}, "--lora: input should be a valid string"),
        (
            {"lora": ["a=/x"], "served_model_name": "b,a"},
            "lora: a name may stand for one model or adapter, got a twice",
        ),
        ({"lora": ["a=/x"], "max_loras": 0}, "max_loras: must be at least 1 with lora, got 0"),
        ({"lora": ["a=/x"], "models": {"m": {}}}, "lora: of several models each has its own adapters, in models"),
        (
            {"models": {"m": {"lora": {"n": "/x"}}, "n": {}}},
            "lora: a name may stand for one model or adapter, got n twice",
        ),
        (
            {"models": {"m": {"lora": {"l": "/"}}, "n": {"lora": {"l": "/"}}}},
            "lora: a name may stand for one model or ",
        ),
        (
            {"models": {"m": {"lora": {"l": "/x"}, "max_loras": 0}}},
            "models: m: max_loras: must be at least 1 with lora",
        ),
        ({"lora": {f"n{i}": "/x" for i in range(1001)}}, "--lora: value should have at most 1000 items"),
        ({"max_loras": 257}, "input should be less than or equal to 256"),
        ({"max_lora_rank": 0}, "input should be greater than or equal to 1"),
    ],
)
def test_adapters_that_cannot_be_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(StartError) as caught:
        resolve(given, {})
    assert message in str(caught.value)


def test_flags_are_few() -> None:
    assert len(FLAGS) <= 30


def test_another_option_of_the_engine_arrives_from_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the flag to what the engine process reads and runs with; nothing on the way names the options."""

    class WiderOptions(EngineOptions, frozen=True, kw_only=True):
        num_knots: int = 0

    class WiderSettings(Settings):
        num_knots: int = 1

    monkeypatch.setattr(settings_module, "EngineOptions", WiderOptions)
    told = engine_options(WiderSettings(num_knots=7, device="cpu"), DEMO)
    read = msgspec.json.decode(msgspec.json.encode(told), type=WiderOptions)
    config = engine_config.resolve(read, load_model_config(DEMO))
    assert isinstance(config.options, WiderOptions) and config.options.num_knots == 7


def test_prefill_servers_need_a_role_and_are_urls() -> None:
    urls = {"WEFT_PREFILL_URLS": "http://a:8000,https://b/prefill"}
    with pytest.raises(StartError, match="WEFT_PREFILL_URLS: prefill_urls needs the kv_role decode or both"):
        resolve({}, urls | {"WEFT_KV_ROLE": "prefill"})
    settings = resolve({}, urls | {"WEFT_KV_ROLE": "decode"}).settings
    assert settings.prefill_urls == ("http://a:8000", "https://b/prefill")
    with pytest.raises(StartError, match="WEFT_PREFILL_URLS: input should be URLs such as"):
        resolve({}, {"WEFT_PREFILL_URLS": "a:8000", "WEFT_KV_ROLE": "decode"})
