"""Merges flags, environment and YAML file into `Settings`, and checks what no setting can check alone.

Owns the origin of each value. A flag beats the environment (`WEFT_PORT`), the environment beats the YAML file
(`port:`), and the file beats the default. An unknown name is an error everywhere.
"""

import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml
from pydantic import ValidationError

from weft.engine.wire.options import MAX_ADAPTERS
from weft.server.settings import EVERYBODY, FIELDS, Settings, StartError, fault, flag_name, suggest

ENV_PREFIX = "WEFT_"
CONFIG_ENV = "WEFT_CONFIG"
"""Names the YAML file if there is no --config. Not a setting itself."""

DOORS = frozenset({"api_key", "api_keys_file", "admin_key", "nodes_token"})
"""The settings that must not be empty: a variable that somebody forgot to fill would open the server to all."""
_NEEDS = {"kv_events_replay": "kv_events", "ssl_certfile": "ssl_keyfile", "ssl_keyfile": "ssl_certfile"}
"""The settings that have no effect, or make no sense, without another."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and the origin of each: the flag, the variable, file:line, or "default"."""

    settings: Settings
    origins: Mapping[str, str]


def resolve(flags: Mapping[str, object], environ: Mapping[str, str], config: pathlib.Path | None = None) -> Resolved:
    """Merge flags, environment and YAML file.

    Args:
        flags: The values on the command line, by setting; "model" is the positional argument.
        environ: The environment. An empty variable counts as not set, but is refused for DOORS.
        config: The YAML file; None: the one that WEFT_CONFIG names, if any.

    Raises:
        StartError: A file cannot be read, a name is unknown, or a value is out of bounds.
    """
    if config is None and environ.get(CONFIG_ENV):
        config = pathlib.Path(environ[CONFIG_ENV])
    given: dict[str, tuple[object, str]] = {} if config is None else _read_yaml(config)
    given |= _read_environment(environ)
    given |= {name: (value, "MODEL" if name == "model" else flag_name(name)) for name, value in flags.items()}
    for name in DOORS & given.keys():
        if not given[name][0]:
            raise StartError(f"{_where(name, given[name][1])}: input should not be empty")
    try:
        settings = Settings.model_validate({name: value for name, (value, _) in given.items()})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise StartError(f"{_where(name, given[name][1])}: {fault(error)}") from None
    origins = {name: given[name][1] if name in given else "default" for name in FIELDS}
    if settings.api_keys_file is not None:
        keys = _read_keys(pathlib.Path(settings.api_keys_file).expanduser(), origins["api_keys_file"])
        settings = settings.model_copy(update={"api_key": (*settings.api_key, *keys)})
        origins["api_key"] = f"{origins['api_key']}, api_keys_file" if "api_key" in given else "api_keys_file"
    for name, needed in _NEEDS.items():
        if getattr(settings, name) is not None and getattr(settings, needed) is None:
            raise StartError(f"{origins[name]}: {name} needs {needed}")
    if set(settings.priority_keys) - {EVERYBODY, *settings.api_key}:
        raise StartError(
            f"{_where('priority_keys', origins['priority_keys'])}: every key must be one of api_key or api_keys_file"
        )
    if settings.models and (other := next((each for each in ("model", "served_model_name") if each in given), None)):
        raise StartError(f"{origins[other]}: {origins['models']} names the models; {other} is for a single one")
    _check_nodes(settings, origins)
    models = {name: settings.for_model(name) for name in settings.models}
    roles = {each.kv_role for each in models.values()} or {settings.kv_role}
    if settings.prefill_urls and not roles & {"decode", "both"}:
        raise StartError(f"{origins['prefill_urls']}: prefill_urls needs the kv_role decode or both")
    if lacking := next((name for name, each in models.items() if each.kv_events_replay and not each.kv_events), None):
        raise StartError(f"models: {lacking}: kv_events_replay needs kv_events")
    for setting in ("kv_events", "kv_events_replay"):
        addresses = [address for each in models.values() if (address := getattr(each, setting))]
        if len(set(addresses)) < len(addresses):
            raise StartError(f"{setting}: each of several models needs an address of its own, in models")
    check_adapters(settings)
    return Resolved(settings, origins)


def _where(name: str, origin: str) -> str:
    """The origin of a setting, and its name where that does not say it: flags and variables do, lines do not."""
    return f"{origin}: {name}" if re.search(r":\d+$", origin) else origin


def _check_nodes(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse machines that have nothing to do."""
    number, size = settings.nnodes, settings.tensor_parallel_size * settings.pipeline_parallel_size
    if settings.node_rank >= number:
        raise StartError(
            f"{_where('node_rank', origins['node_rank'])}: must be less than nnodes, {number}, got {settings.node_rank}"
        )
    if number == 1:
        return
    if size % number:
        product = "tensor_parallel_size times pipeline_parallel_size"
        raise StartError(f"{_where('nnodes', origins['nnodes'])}: must divide {product}, {size}, got {number}")
    if settings.models:
        raise StartError(f"{origins['nnodes']}: several machines serve one model, and models names some")


def check_meeting(settings: Settings) -> None:
    """Refuse machines that could not find or trust each other. Raises StartError."""
    lacking = next((name for name in ("master_addr", "nodes_token") if not getattr(settings, name)), None)
    if settings.nnodes > 1 and lacking:
        raise StartError(f"nnodes: {settings.nnodes} machines need {lacking}")


def check_adapters(settings: Settings) -> None:
    """Raise StartError if the names of adapters are not their own, or there is no room for them.

    The name of a model that has none yet is not looked at.
    """
    if settings.models and settings.lora:
        raise StartError("lora: of several models each has its own adapters, in models")
    models = {name: settings.for_model(name) for name in settings.models} or {"": settings}
    names = settings.names if settings.models or settings.served_model_name else []
    for model, told in models.items():
        if told.lora and told.max_loras == 0:
            raise StartError(f"{f'models: {model}: ' * bool(model)}max_loras: must be at least 1 with lora, got 0")
        names = [*names, *told.lora]
    if len(names) > MAX_ADAPTERS:
        raise StartError(f"lora: there may be at most {MAX_ADAPTERS} models and adapters, got {len(names)}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StartError(f"lora: a name may stand for one model or adapter, got {twice} twice")


def _read_keys(path: pathlib.Path, origin: str) -> list[str]:
    """The keys in a file. Raises StartError if there are none: an empty file must not open the server to all."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{origin}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if keys := [line for line in lines if line and not line.startswith("#")]:
        return keys
    raise StartError(f"{origin}: {path} holds no key")


def _read_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    given: dict[str, tuple[object, str]] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_ENV:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in FIELDS or variable != variable.upper():
            suggested = suggest(name, lambda known: ENV_PREFIX + known.upper())
            raise StartError(f"{variable}: no such setting{suggested}")
        if value or name in DOORS:
            given[name] = (value, variable)
    return given


def _read_yaml(path: pathlib.Path) -> dict[str, tuple[object, str]]:
    """Value and file:line by setting. Keys may have dashes, as flags do."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise StartError(f"{path}:{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise StartError(f"{path}: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise StartError(f"{path}:1: expected lines of the form 'setting: value'")
    try:
        _refuse_repeats(path, root, has_dashes=True)
    except RecursionError:
        raise StartError(f"{path}: a value holds itself, or is nested too deeply") from None
    given: dict[str, tuple[object, str]] = {}
    for key_node, value_node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = str(loader.construct_object(key_node, deep=True))
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise StartError(f"{place}: no such setting: {key}{suggest(name, str)}")
        value = loader.construct_object(value_node, deep=True)
        if value is not None or name in DOORS:
            given[name] = (value, place)
    return given


def _refuse_repeats(path: pathlib.Path, node: yaml.Node, *, has_dashes: bool = False) -> None:
    """Raise StartError if a mapping has a key twice, of which YAML takes the last one in silence."""
    first: dict[str, int] = {}
    for each in node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else []:
        key, inner = each if isinstance(each, tuple) else (None, each)
        if key is not None:
            name = str(key.value).replace("-", "_") if has_dashes else str(key.value)
            line = key.start_mark.line + 1
            if name in first:
                raise StartError(f"{path}:{line}: {key.value} stands in line {first[name]} as well")
            first[name] = line
        _refuse_repeats(path, inner)
