"""The manifests use the commands and the settings that exist, and agree with themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from kvferry.cli import app
from kvferry.cluster import try_workers_ports
from kvferry.settings import Settings, load

BASE = Path(__file__).parents[2] / "k8s" / "base"
CONFIG = BASE / "config" / "kvferry.yaml"
ROLES = ["router", "prefill", "decode"]
POD = {"metadata.name": "kvferry-pod-0", "status.podIP": "10.0.0.7", "spec.nodeName": "n1"}
PROBES = {  # which paths a role answers on which of its named ports
    "router": {("/live", "http"), ("/ready", "http")},
    "prefill": {("/live", "system"), ("/ready", "system")},
    "decode": {("/live", "system"), ("/ready", "system")},
}


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted(BASE.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents() if document["kind"] in kinds]


def container(role: str) -> dict[str, Any]:
    for workload in of_kind("Deployment", "StatefulSet"):
        for candidate in workload["spec"]["template"]["spec"]["containers"]:
            if candidate["name"] == role:
                assert isinstance(candidate, dict)
                return candidate
    raise AssertionError(f"no container {role}")


def parse(args: list[str]) -> tuple[str, dict[str, Any]]:
    """What the real command line makes of the arguments, without running the command."""
    group = typer.main.get_command(app)
    context = group.make_context("kvferry", list(args))
    name, command, rest = group.resolve_command(context, list(args))  # type: ignore[attr-defined]
    with command.make_context(name, rest, parent=context) as parsed:
        return name, dict(parsed.params)


def settings_of(role: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for variable in container(role)["env"]:
        field = variable["valueFrom"]["fieldRef"]["fieldPath"]
        monkeypatch.setenv(variable["name"], POD[field])
    _, params = parse(container(role)["args"])
    ports = {name: params[name] for name in params if name.endswith("port") and params[name]}
    return load(CONFIG, {role: ports})


def spec_of(role: str) -> dict[str, Any]:
    """The pod of a role."""
    pods = [work["spec"]["template"]["spec"] for work in of_kind("Deployment", "StatefulSet")]
    (spec,) = [pod for pod in pods if pod["containers"][0]["name"] == role]
    assert isinstance(spec, dict)
    return spec


def components(selector: dict[str, Any]) -> set[str]:
    """Of which parts a selector finds the pods."""
    labels, found = dict(selector["matchLabels"]), set()
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        found |= set(expression["values"])
        assert expression["key"] == "app.kubernetes.io/component"
    assert labels.pop("app.kubernetes.io/name") == "kvferry"
    return found or {labels["app.kubernetes.io/component"]}


def test_kustomize_lists_every_manifest_and_the_settings_file() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    manifests = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == manifests
    (generator,) = kustomization["configMapGenerator"]
    assert [BASE / file for file in generator["files"]] == [CONFIG]


@pytest.mark.parametrize("role", ROLES)
def test_a_pods_arguments_parse_with_the_real_command_line(role: str) -> None:
    assert container(role)["command"] == ["kvferry"]
    name, params = parse(container(role)["args"])
    assert name == role
    mounts = {mount["mountPath"] for mount in container(role)["volumeMounts"]}
    assert str(params["config"].parent) in mounts
    assert params["config"].name == CONFIG.name


@pytest.mark.parametrize("role", ROLES)
def test_a_pods_settings_load_and_its_ports_are_theirs(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = getattr(settings_of(role, monkeypatch), role)
    assert section.host == "10.0.0.7"
    assert section.redis_url == "redis://kvferry-redis:6380/0"
    ports = {port["name"]: port["containerPort"] for port in container(role)["ports"]}
    if role == "router":
        assert ports == {"grpc": section.grpc_port, "http": section.http_port}
    else:
        assert section.name == "kvferry-pod-0"
        assert ports == {"grpc": section.port, "system": section.system_port}


@pytest.mark.parametrize("role", ROLES)
def test_a_probe_asks_only_for_what_is_served(role: str) -> None:
    names = {port["name"] for port in container(role)["ports"]}
    for key in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container(role)[key]
        if "httpGet" in probe:
            assert (probe["httpGet"]["path"], probe["httpGet"]["port"]) in PROBES[role]
        else:
            assert probe["tcpSocket"]["port"] in names


def test_every_service_reaches_pods_and_ports_that_exist() -> None:
    pods = [w["spec"]["template"] for w in of_kind("Deployment", "StatefulSet")]
    for service in of_kind("Service"):
        selector = service["spec"]["selector"].items()
        matched = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
        assert len(matched) == 1, service["metadata"]["name"]
        (only,) = matched[0]["spec"]["containers"]
        names = {port["name"] for port in only["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_a_workload_selects_its_own_pods_and_mounts_what_it_declares() -> None:
    workloads = of_kind("Deployment", "StatefulSet")
    assert len(workloads) == 4
    for workload in workloads:
        template = workload["spec"]["template"]
        assert workload["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        (only,) = template["spec"]["containers"]
        assert {mount["name"] for mount in only["volumeMounts"]} == volumes
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_the_time_to_drain(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_s = getattr(settings_of(role, monkeypatch), role).drain_s
    before = container(role).get("lifecycle", {}).get("preStop", {}).get("exec", {})
    program, wait_s = before.get("command", ["sleep", "0"])
    assert program == "sleep"  # Services are told at the same time as the pod, and take a moment
    assert (float(wait_s) > 0) == (
        role == "router"
    )  # workers are found in the index, which is told
    assert spec_of(role)["terminationGracePeriodSeconds"] >= float(wait_s) + drain_s + 10


def test_on_one_machine_the_same_file_is_a_cluster_whose_parts_do_not_meet_on_a_port() -> None:
    settings = load(CONFIG, {"redis_url": ""})
    try_workers_ports(settings)
    assert (settings.num_prefill, settings.redis_url) == (2, "")


def test_each_pod_is_reached_by_those_who_call_it_and_by_no_others() -> None:
    reached: dict[str, set[tuple[frozenset[str], str]]] = {}
    for policy in of_kind("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            callers = frozenset[str]().union(
                *(components(peer["podSelector"]) for peer in rule.get("from", ()))
            )
            ports = [port["port"] for port in rule.get("ports", [{"port": "any"}])]
            for target in components(policy["spec"]["podSelector"]):
                reached.setdefault(target, set()).update((callers, port) for port in ports)
    anybody, ours = frozenset[str](), frozenset(ROLES)
    worker = {(ours, "any"), (anybody, "system")}
    assert reached == {
        "router": {(anybody, "grpc"), (anybody, "http")},
        "prefill": worker,
        "decode": worker,
        "redis": {(ours, "redis")},
    }
    for target, rules in reached.items():
        names = {port["name"] for port in spec_of(target)["containers"][0]["ports"]}
        assert {port for _, port in rules} - {"any"} <= names
