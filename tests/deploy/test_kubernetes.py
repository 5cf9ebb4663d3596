"""deploy/kubernetes/: the manifests have the fields that their kinds have, and fit each other and Weft."""

import copy
import json
import pathlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from tests.server.conftest import Site
from weft.server.ray import deploy as environment
from weft.server.resolve import Resolved, resolve
from weft.server.settings import FLAGS, flag_name
from weft.server.supervise.supervisor import DRAIN_MARGIN_S

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
Manifest = dict[str, Any]


@cache
def manifests(file: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8")))


def find(file: str, kind: str, name: str = "weft") -> Manifest:
    (found,) = (m for m in manifests(file) if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


# --- fields ---


def schema(fields: Any) -> dict[str, Any]:
    """The JSON schema of an entry of kubernetes_fields.yaml."""
    if isinstance(fields, list):
        return {"type": "array", "items": schema(fields[0])}
    if isinstance(fields, dict):
        closed: dict[str, Any] = {"type": "object", "additionalProperties": False}
        if "..." in fields:
            return closed | {"additionalProperties": schema(fields["..."])}
        closed["properties"] = {name.rstrip("*"): schema(below) for name, below in fields.items()}
        return closed | {"required": [name.rstrip("*") for name in fields if name.endswith("*")]}
    kind, *bounds = fields.split()
    made: dict[str, Any] = {"type": kind.split("|")}
    for bound in bounds:
        if bound.startswith((">=", "<=")):
            made["minimum" if bound.startswith(">") else "maximum"] = int(bound[2:])
        else:
            made.setdefault("enum", []).append(bound)
    return made


@cache
def schemas() -> dict[str, jsonschema.Draft202012Validator]:
    """By apiVersion and kind."""
    text = (pathlib.Path(__file__).parent / "kubernetes_fields.yaml").read_text(encoding="utf-8")
    usual = {"apiVersion*": "string", "kind*": "string"}
    return {
        kind: jsonschema.Draft202012Validator(schema(usual | fields)) for kind, fields in yaml.safe_load(text).items()
    }


def faults(manifest: Manifest) -> list[str]:
    errors = schemas()[f"{manifest['apiVersion']} {manifest['kind']}"].iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]


def nodes(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield from nodes(below, f"{path}.{name}")


@pytest.mark.parametrize("file", FILES)
def test_every_field_exists(file: str) -> None:
    assert [fault for manifest in manifests(file) for fault in faults(manifest)] == []


@pytest.mark.parametrize("file", FILES)
def test_a_wrong_field_is_found_wherever_it_is(file: str) -> None:
    free = ("labels", "annotations", "matchLabels", "data", "stringData", "requests", "limits", "selector")
    for manifest in manifests(file):
        for path, node in nodes(copy.deepcopy(manifest)):
            if not isinstance(node, dict) or path.endswith((*free, "triggers.0.metadata", "rayStartParams")):
                continue
            changed = copy.deepcopy(manifest)
            (place,) = (below for there, below in nodes(changed) if there == path)
            place["wrongField"] = {}
            assert any("wrongField" in fault for fault in faults(changed)), path


def test_a_missing_field_and_a_wrong_type_are_found() -> None:
    pool = copy.deepcopy(find("gateway.yaml", "InferencePool"))
    pool["spec"]["targetPorts"][0]["number"] = 70_000
    del pool["spec"]["selector"]
    assert sorted(faults(pool)) == [
        "$.spec.targetPorts[0].number: 70000 is greater than the maximum of 65535",
        "$.spec: 'selector' is a required property",
    ]
    deployment = copy.deepcopy(find("weft.yaml", "Deployment"))
    deployment["spec"]["replicas"] = "many"
    assert faults(deployment) == ["$.spec.replicas: 'many' is not of type 'integer'"]


# --- what runs Weft ---


def pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """Where a manifest describes pods that run an image of the Dockerfile."""
    for _, node in nodes(manifest):
        if isinstance(node, dict) and any(is_weft(container) for container in node.get("containers", ())):
            yield node


def is_weft(container: Manifest) -> bool:
    return str(container["image"]).startswith("weft:")


PODS = [(file, pod) for file in FILES for manifest in manifests(file) for pod in pod_specs(manifest)]
FOLLOWER = find("nodes.yaml", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
"""It has no HTTP."""
SERVERS = [(file, pod) for file, pod in PODS if file != "ray.yaml" and pod is not FOLLOWER]
"""Other pods that `weft serve` runs in; in the rest Ray starts replicas."""


def settings_of(file: str, pod: Manifest, tmp_path: pathlib.Path) -> Resolved:
    """The settings of a pod, resolved as its container does: flags, environment, image."""
    (container,) = pod["containers"]
    environ = dict(re.findall(r"^(?:ENV| )\s+(WEFT_\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    for item in container.get("env", ()):
        given = item.get("valueFrom", {})
        if "secretKeyRef" in given and item["name"].startswith("WEFT_"):
            environ[item["name"]] = find(file, "Secret")["stringData"][given["secretKeyRef"]["key"]]
        elif "leaderworkerset.sigs.k8s.io/worker-index" in given.get("fieldRef", {}).get("fieldPath", ""):
            environ[item["name"]] = "1"
        elif "value" in item:
            environ[item["name"]] = item["value"]
    for source in container.get("envFrom", ()):
        environ |= find(file, "ConfigMap", source["configMapRef"]["name"])["data"]
    if keys := environ.get("WEFT_API_KEYS_FILE"):
        environ["WEFT_API_KEYS_FILE"] = str(tmp_path / "keys")
        (tmp_path / "keys").write_text(find(file, "Secret")["stringData"][pathlib.Path(keys).name])
        assert str(pathlib.Path(keys).parent) in [mount["mountPath"] for mount in container["volumeMounts"]]
    command, *arguments = container["args"]
    assert command == "serve"
    by_flag = {flag_name(name): name for name in FLAGS}
    flags: dict[str, Any] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if equals and by_flag[flag] == "served_model_name":
            flags.setdefault("served_model_name", []).append(value)
        else:
            flags[by_flag[flag] if equals else "model"] = value or argument
    return resolve(flags, {name: value for name, value in environ.items() if name.startswith("WEFT_")})


@pytest.mark.parametrize(("file", "pod"), PODS)
def test_the_image_is_of_the_dockerfile_and_services_set_no_settings(file: str, pod: Manifest) -> None:
    """Kubernetes sets WEFT_PORT for a Service `weft`, which Weft refused as a port."""
    for container in filter(is_weft, pod["containers"]):
        assert f" AS {container['image'].removeprefix('weft:').removesuffix('-ray')}\n" in DOCKERFILE
    if file != "kserve.yaml":
        assert pod["enableServiceLinks"] is False
    else:
        assert find(file, "InferenceService", "qwen3")["spec"]["predictor"]["enableServiceLinks"] is False


@pytest.mark.parametrize(("file", "pod"), SERVERS)
def test_weft_understands_its_settings_and_answers_the_probes(file: str, pod: Manifest, tmp_path: pathlib.Path) -> None:
    (container,) = pod["containers"]
    settings = settings_of(file, pod, tmp_path).settings
    assert container.get("command", ["weft"]) == json.loads(re.findall(r"ENTRYPOINT (.*)", DOCKERFILE)[0])
    names = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
    scheme = "HTTPS" if settings.ssl_certfile else "HTTP"
    paths = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    for probe, path in paths.items():
        request = container[probe]["httpGet"]
        assert names.get(request["port"], request["port"]) == settings.port == 8000 and settings.host == "0.0.0.0"
        assert request["path"] == path and Site().call("GET", path).status == 200
        assert request.get("scheme", "HTTP") == scheme
    patience = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    assert patience >= 300, "an engine that is restarted loads its model again"
    predictor = find(file, "InferenceService", "qwen3")["spec"]["predictor"] if file == "kserve.yaml" else pod
    _, stop_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert predictor["terminationGracePeriodSeconds"] >= float(stop_s) + settings.drain_timeout_s + DRAIN_MARGIN_S


def test_a_follower_has_the_settings_of_its_leader(tmp_path: pathlib.Path) -> None:
    ours = find("nodes.yaml", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, follower = (
        settings_of("nodes.yaml", ours[name]["spec"], tmp_path).settings
        for name in ("leaderTemplate", "workerTemplate")
    )
    assert (leader.nnodes, leader.node_rank, follower.node_rank) == (ours["size"], 0, 1)
    assert follower.model_copy(update={"node_rank": 0}) == leader
    (container,) = ours["leaderTemplate"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert leader.tensor_parallel_size * leader.pipeline_parallel_size == ours["size"] * gpus
    both, http = find("nodes.yaml", "NetworkPolicy")["spec"]["ingress"]
    for template in ("leaderTemplate", "workerTemplate"):
        labels = ours[template]["metadata"]["labels"].items()
        assert both["from"][0]["podSelector"]["matchLabels"].items() <= labels
    assert http == {"ports": [{"port": 8000}]}
    selected = find("nodes.yaml", "Service")["spec"]["selector"].items()
    assert selected <= ours["leaderTemplate"]["metadata"]["labels"].items()
    assert not selected <= ours["workerTemplate"]["metadata"]["labels"].items()


def test_kserve_finds_the_container_and_the_model() -> None:
    runtime = find("kserve.yaml", "ClusterServingRuntime")
    service = find("kserve.yaml", "InferenceService", "qwen3")
    assert service["spec"]["predictor"]["model"]["runtime"] == "weft"
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container"
    llm = find("kserve-llm.yaml", "LLMInferenceService", "qwen3")["spec"]
    (container,) = llm["template"]["containers"]
    assert container["name"] == "main"
    assert f"--served-model-name={llm['model']['name']}" in container["args"]
    for args in (container["args"], runtime["spec"]["containers"][0]["args"]):
        assert args[:2] == ["serve", "/mnt/models"]


# --- what looks at Weft ---


def test_metrics_are_where_prometheus_and_keda_look() -> None:
    pod = find("weft.yaml", "Deployment")["spec"]["template"]["metadata"]
    assert pod["annotations"]["prometheus.io/path"] == "/metrics"
    runtime = find("kserve.yaml", "ClusterServingRuntime")["spec"]["annotations"]
    assert runtime == {"prometheus.kserve.io/port": "8000", "prometheus.kserve.io/path": "/metrics"}
    scaled = find("keda.yaml", "ScaledObject")["spec"]
    assert find("weft.yaml", "Deployment", scaled["scaleTargetRef"]["name"])
    named = {name for file in FILES for name in re.findall(r"\bweft:[a-z]\w{6,}", (FOLDER / file).read_text())}
    shown = Site().call("GET", "/metrics").text
    assert "weft:num_requests_waiting" in scaled["triggers"][0]["metadata"]["query"]
    assert {name for name in named if f"\n{name}{{" not in shown} == set()


def test_the_gateway_reaches_pods_of_weft_by_way_of_the_picker() -> None:
    pool = find("gateway.yaml", "InferencePool")["spec"]
    deployment = find("weft.yaml", "Deployment")["spec"]
    assert pool["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()
    service = find("gateway.yaml", "Service", pool["endpointPickerRef"]["name"])["spec"]
    picker = find("gateway.yaml", "Deployment", "weft-picker")["spec"]["template"]
    assert service["selector"].items() <= picker["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    assert f"--grpc-port={service['ports'][0]['port']}" in picker["spec"]["containers"][0]["args"]
    (rule,) = find("gateway.yaml", "HTTPRoute")["spec"]["rules"]
    assert [(ref["kind"], ref["name"]) for ref in rule["backendRefs"]] == [("InferencePool", "weft")]
    assert find("gateway.yaml", "InferenceObjective", "background")["spec"]["poolRef"]["name"] == "weft"


def test_the_picker_finds_what_it_reads_of_weft() -> None:
    environ = find("gateway.yaml", "ConfigMap")["data"]
    settings = resolve({}, environ).settings
    config = yaml.safe_load(find("gateway.yaml", "ConfigMap", "weft-picker")["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    used = [plugin for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    used += [part for source in config["dataLayer"]["sources"] for part in (source, *source["extractors"])]
    assert {part["pluginRef"] for part in used} <= plugins.keys()
    assert settings.metrics_prefix == "vllm", "the engine that the picker expects if it is told of no other"
    assert settings.api_key == (), "the picker has no key"
    assert Site().call("GET", plugins["metrics-data-source"]["path"]).status == 200
    tokens = plugins["token-producer"]
    assert (tokens["modelName"],) == settings.served_model_name
    port = find("weft.yaml", "Service")["spec"]["ports"][0]["port"]
    assert tokens["vllm"]["url"] == f"http://weft:{port}"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert Site().call("POST", "/v1/chat/completions/render", json=chat).json["token_ids"]
    assert Site().call("POST", "/v1/completions/render", json={"prompt": "Hi"}).json[0]["token_ids"]
    ports = plugins["precise-prefix-cache-producer"]["kvEventsConfig"]["podDiscoveryConfig"]
    assert settings.kv_events == f"tcp://*:{ports['socketPort']}"
    assert settings.kv_events_replay == f"tcp://*:{ports['replaySocketPort']}"
    open_to = find("gateway.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert {item["port"] for item in open_to[0]["ports"]} == {8000, *ports.values()}
    assert open_to[1]["ports"] == [{"port": 8000}], "events hold prompts"


def test_ray_runs_as_weft_needs_it() -> None:
    cluster = find("ray.yaml", "RayService")["spec"]["rayClusterConfig"]
    secret = find("ray.yaml", "Secret", "weft-ray")["stringData"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["ray"] == [f"ray[serve]=={cluster['rayVersion']}"]
    assert cluster["authOptions"]["mode"] == environment.RAY["RAY_AUTH_MODE"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value") for item in container["env"]}
        assert (environment.SERVE | environment.RAY).items() - {("RAY_AUTH_MODE", "token")} <= given.items()
        assert [item["valueFrom"]["secretKeyRef"]["key"] for item in container["env"] if "valueFrom" in item] == [
            *secret
        ]


def test_what_a_manifest_names_exists() -> None:
    deployment = find("weft.yaml", "Deployment")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in deployment["volumes"]}
    (container,) = deployment["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert find("weft.yaml", "PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"])
    keys = find("weft.yaml", "Secret", volumes["keys"]["secret"]["secretName"])["stringData"]
    assert {item["key"] for item in volumes["keys"]["secret"]["items"]} <= keys.keys()
    assert container["env"][0]["valueFrom"]["secretKeyRef"]["key"] in keys
    cache_mount = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "cache")
    assert f"VOLUME {cache_mount}\n" in DOCKERFILE


def test_every_file_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert [file for file in FILES if f"(../deploy/kubernetes/{file})" not in page] == []
