# SPDX-License-Identifier: Apache-2.0
"""What is in examples/kubernetes/ fits together; it is not applied to a cluster here.

Where there is no ``kubectl`` every resource is checked as its file has it, and nothing is built.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from pydantic import ByteSize, TypeAdapter

from s3ec.cli.app import app
from s3ec.config import load_settings
from s3ec.settings import ENV_PREFIX

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MONITORING = FOLDER / "components" / "monitoring"
JOBS = sorted(path.name for path in (FOLDER / "jobs").iterdir())
# The oldest that the manifests need (backoffLimitPerIndex), and the newest that there is.
VERSIONS = ("1.33", kubernetes_validate.latest_version())
KUBECTL = shutil.which("kubectl", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
Resource = dict[str, Any]

# What the manifests use of the Prometheus operator's v1; its own schemas have 2 MB.
_NAME = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: list[str], **properties: Any) -> Resource:
    properties = {name.rstrip("_"): schema for name, schema in properties.items()}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


_TEXT = {"type": "string", "minLength": 1}
_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}
_RULE = _object(
    ["expr"], alert=_TEXT, record=_TEXT, expr=_TEXT, labels=_TEXTS, annotations=_TEXTS,
    for_=_DURATION,
)  # fmt: skip
_RELABELING = _object(
    [], sourceLabels={"type": "array", "items": _TEXT}, regex=_TEXT, targetLabel=_TEXT,
    replacement=_TEXT,
)  # fmt: skip
_ENDPOINT = _object(
    ["port"], port=_TEXT, path=_TEXT, interval=_DURATION,
    metricRelabelings={"type": "array", "items": _RELABELING},
)  # fmt: skip
_SPECS = {
    "PodMonitor": _object(
        ["selector", "podMetricsEndpoints"],
        selector=_object(["matchLabels"], matchLabels=_TEXTS),
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
    ),
    "PrometheusRule": _object(
        ["groups"],
        groups={
            "type": "array",
            "items": _object(
                ["name", "rules"], name=_TEXT, rules={"type": "array", "items": _RULE}
            ),
        },
    ),
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def validate(resource: Resource) -> None:
    """Compare a resource with the schemas of its kind; unknown fields are refused."""
    _validate(json.dumps(resource, sort_keys=True))


@cache  # builds have most of their resources in common
def _validate(text: str) -> None:
    resource = json.loads(text)
    if resource["apiVersion"] == "monitoring.coreos.com/v1":
        schema = _object(
            ["apiVersion", "kind", "metadata", "spec"],
            apiVersion=_TEXT, kind=_TEXT, metadata=_NAME, spec=_SPECS[resource["kind"]],
        )  # fmt: skip
        jsonschema.validate(resource, schema)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)


def build(folder: Path) -> list[Resource]:
    """What ``kubectl apply -k`` would send."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", folder], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(resources: list[Resource], kind: str, name: str) -> Resource:
    [found] = [
        each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def pods(resources: list[Resource]) -> Iterator[tuple[Resource, Resource]]:
    """Each workload and the spec of its pods."""
    for each in resources:
        spec = each.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template:
            yield each, template["spec"]


def containers(pod: Resource) -> list[Resource]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def nbytes(quantity: str) -> int:
    """Of ``60Gi`` or ``50GiB``."""
    return int(TypeAdapter(ByteSize).validate_python(quantity.removesuffix("B") + "B"))


def variables() -> dict[str, str]:
    """Those of fleet.env, and what Kubernetes sets for an indexed job."""
    lines = (FOLDER / "site/values/fleet.env").read_text().splitlines()
    fleet = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    config = (FOLDER / "site/values/ec-transfer-config.json").read_text()
    return {**fleet, "EC_TRANSFER_CONFIG": config, "JOB_COMPLETION_INDEX": "0"}


def expanded(text: str) -> str:
    """As Kubernetes does ``$(NAME)``, and a shell ``$NAME``."""
    known = variables()
    return re.sub(r"\$\(?(\w+)\)?", lambda found: known[found[1]], text)


def words_of(container: Resource) -> list[str]:
    """The command line of a container, without a shell around it."""
    words = [*container["command"], *container.get("args", [])]
    if words[:2] == ["sh", "-c"]:
        words = re.split(r" \|\||;", shlex.split(words[2], comments=False) and words[2])[0].split()
        words = [word.strip('"') for word in words]
        words = words[words.index("s3ec") :]
    return [expanded(word) for word in words]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The example with files that are the user's own; ``choose`` edits it."""
    for name in ("kubernetes", "observability"):
        shutil.copytree(FOLDER.parent / name, tmp_path / name)
    example = tmp_path / "kubernetes"
    for name in ("keys", "maintainer-keys"):
        keys = "AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=secret\n"
        (example / f"components/static-keys/{name}.env").write_text(keys)
    (example / "components/private-ca/ca.pem").write_text("a certificate\n")
    return example


def choose(example: Path, *names: str, without: tuple[str, ...] = ()) -> None:
    """Comment components in and out, as the files themselves tell to."""
    for path in (example / "kustomization.yaml", example / "site/kustomization.yaml"):
        text = path.read_text()
        for name in names:
            text = re.sub(rf"# (- \S*components/{name})$", r"\1", text, flags=re.M)
        for name in without:
            text = re.sub(rf"^( *)(- \S*components/{name})$", r"\1# \2", text, flags=re.M)
        path.write_text(text)


# -- without kubectl -------------------------------------------------------------------------------


def test_every_file_that_a_kustomization_names_is_there_and_fits_its_schema() -> None:
    used = set()
    for kustomization in sorted(FOLDER.rglob("kustomization.yaml")):
        told = read(kustomization)
        folder = kustomization.parent
        generators = [*told.get("configMapGenerator", []), *told.get("secretGenerator", [])]
        files = [
            name for each in generators for name in (*each.get("envs", []), *each.get("files", []))
        ]
        theirs = {"keys.env", "maintainer-keys.env", "ca.pem"}  # of the user
        assert all((folder / name).is_file() for name in files if name not in theirs)
        used |= {folder / name for name in files}
        for patch in told.get("patches", []):
            used |= {folder / patch["path"]} if "path" in patch else set()
        for name in (*told.get("resources", []), *told.get("components", [])):
            path = (folder / name).resolve()
            if name.startswith("https://"):
                continue
            if path.is_dir():
                assert (path / "kustomization.yaml").is_file(), name
                continue
            validate(read(path))
            used.add(path)
    others = {
        FOLDER / "README.md",
        FOLDER / "production-stack/values.yaml",
        MONITORING / "make-rule",
    }
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert {path for path in files - used - others if path.name != "kustomization.yaml"} == set()


def test_schemas_refuse_a_field_that_is_misspelt() -> None:
    deployment = read(FOLDER / "base/deployment.yaml")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        validate(deployment)
    monitor = read(MONITORING / "podmonitor.yaml")
    monitor["spec"]["podMetricEndpoints"] = []
    with pytest.raises(jsonschema.ValidationError, match="podMetricEndpoints"):
        validate(monitor)


def test_rules_of_the_operator_are_those_of_the_observability_example(copy: Path) -> None:
    subprocess.run([copy / "components/monitoring/make-rule"], check=True)
    made = (copy / "components/monitoring/prometheusrule.yaml").read_text()
    assert (MONITORING / "prometheusrule.yaml").read_text() == made, "call make-rule"
    rules = read(ROOT / "examples/observability/rules.yaml")
    assert yaml.safe_load(made)["spec"] == rules


def test_settings_are_what_the_connector_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: value for name, value in variables().items() if name.startswith(ENV_PREFIX)}
    assert ours
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    transfer = json.loads(variables()["EC_TRANSFER_CONFIG"])
    assert transfer["ec_connector"] == "S3ECConnector"
    loaded = load_settings(transfer["ec_connector_extra_config"])
    assert {origin for origin in loaded.origins.values() if origin.startswith("env ")} == {
        f"env {name}" for name in ours
    }


def test_account_is_the_one_that_terraforms_examples_make_a_role_for() -> None:
    name = read(FOLDER / "account/serviceaccount.yaml")["metadata"]["name"]
    namespace = read(FOLDER / "site/kustomization.yaml")["namespace"]
    patch = read(FOLDER / "components/irsa/kustomization.yaml")["patches"][0]
    assert patch["target"] == {"kind": "ServiceAccount", "name": name}
    assert re.search(
        r"role-arn: arn:aws:iam::\d{12}:role/embeddings-engines$", patch["patch"], re.M
    )
    examples = ROOT / "terraform" / "examples"
    assert "${var.name}-engines" in (examples / "complete" / "main.tf").read_text()
    wanted = f'{{ namespace = "{namespace}", service_account = "{name}" }}'
    assert wanted in (examples / "cross-region" / "variables.tf").read_text()


def test_values_of_the_production_stack_name_settings_and_an_image_of_ours() -> None:
    spec = read(FOLDER / "production-stack/values.yaml")["servingEngineSpec"]
    [model] = spec["modelSpec"]
    env = {each["name"]: each["value"] for each in model["env"]}
    arguments = model["vllmConfig"]["extraArgs"]
    transfer = json.loads(arguments[arguments.index("--ec-transfer-config") + 1])
    assert transfer == {"ec_connector": "S3ECConnector", "ec_role": "ec_both"}
    # The chart leaves a pod 30 s.
    assert int(arguments[arguments.index("--shutdown-timeout") + 1]) < 30
    [image] = read(FOLDER / "site/kustomization.yaml")["images"]
    assert (model["repository"], model["tag"]) == (image["newName"], image["newTag"])
    sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in model["extraVolumes"]}
    assert nbytes(env["S3EC_CACHE_BYTES"]) < nbytes(sizes["tier"])
    mounts = {each["mountPath"]: each["name"] for each in model["extraVolumeMounts"]}
    assert mounts[str(Path(env["S3EC_CACHE_DIR"]).parent)] == "tier"
    # Its root file system is read-only, and the chart has HF_HOME=/tmp.
    assert mounts[env["HOME"]] == "weights"


# -- built -----------------------------------------------------------------------------------------


@needs_kubectl
@pytest.mark.parametrize(
    ("names", "without"),
    [
        ((), ()),
        ((), ("hydrate",)),
        (("local-nvme", "hydrate-nodes", "monitoring"), ("hydrate",)),
        (("local-nvme", "pod-identity"), ("irsa",)),
        (("static-keys", "private-ca", "monitoring"), ("irsa",)),
    ],
)
def test_every_choice_of_components_builds_and_fits_the_schemas(
    copy: Path, names: tuple[str, ...], without: tuple[str, ...]
) -> None:
    choose(copy, *names, without=without)
    for folder in (copy, *(copy / "jobs" / job for job in JOBS)):
        resources = build(folder)
        for resource in resources:
            validate(resource)
            assert resource["metadata"]["namespace"] == "serving"
        made = {(each["kind"], each["metadata"]["name"]) for each in resources}
        [image] = read(FOLDER / "site/kustomization.yaml")["images"]
        for workload, pod in pods(resources):
            for container in containers(pod):
                assert container["image"] == f"{image['newName']}:{image['newTag']}"
            assert ("ServiceAccount", pod["serviceAccountName"]) in made
            # All that a pod refers to is made with it, or is the user's and optional.
            text = yaml.safe_dump(workload)
            for name in re.findall(r"name: ((?:fleet|s3ec|s3-ca|s3-keys)-\w{10})$", text, re.M):
                assert made & {("ConfigMap", name), ("Secret", name)}


def run_by_the_command_line(words: list[str]) -> str:
    """Parse a command line of a pod; the command's name."""
    if words[0] != "s3ec":
        assert words[0] in {"vllm", "install"}
        return words[0]
    command = typer.main.get_command(app)
    context = command.make_context("s3ec", words[1:])
    inner = command.get_command(context, words[1])  # type: ignore[attr-defined]
    parsed = inner.make_context(words[1], words[2:], parent=context).params
    for name in set(parsed) & {"model", "source", "shard"}:
        assert parsed[name]
    if words[1] == "precompute":
        assert parsed["shard"] == f"0/{variables()['SHARDS']}"
    if words[1] == "gc":
        assert parsed["yes"]  # nobody is there to be asked
        assert parsed["older_than"] > 0
    return words[1]


@needs_kubectl
@pytest.mark.parametrize("folder", ["", *(f"jobs/{job}" for job in JOBS)])
def test_pods_call_our_commands_as_nobody_special_and_write_into_volumes_only(
    copy: Path, folder: str
) -> None:
    choose(copy, "hydrate-nodes")
    called = set()
    for workload, pod in pods(build(copy / folder)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 2000
        # A folder of the node is no volume that fsGroup changes.
        assert pod["securityContext"].get("fsGroup") == (
            None if workload["kind"] == "DaemonSet" else 2000
        )
        assert pod["enableServiceLinks"] is False  # VLLM_PORT, of a service named vllm
        volumes = {each["name"] for each in pod["volumes"]}
        for container in containers(pod):
            called.add(run_by_the_command_line(words_of(container)))
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "limits" in container["resources"]
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes
            env = {each["name"]: each.get("value") for each in container.get("env", [])}
            assert all(env[name] in mounts for name in ("HOME", "HF_HOME") if name in env)
            assert not [name for name, value in env.items() if value and "KEY" in name]
            if container["name"] == "tier-folder":
                assert context["runAsUser"] == 0  # a hostPath's folder is root's
                assert container["command"][0] == "install"
            else:
                assert context.get("runAsUser") is None
    assert (Path(folder).name or "hydrate") in called


@needs_kubectl
@pytest.mark.parametrize("folder", ["", "jobs/precompute"])
def test_sizes_come_from_one_file_and_fit_each_other(copy: Path, folder: str) -> None:
    fleet = copy / "site/values/fleet.env"
    changed = fleet.read_text().replace("GPUS=1", "GPUS=2").replace("REPLICAS=2", "REPLICAS=7")
    changed = changed.replace("CPU=6", "CPU=5").replace("MEMORY=26Gi", "MEMORY=27Gi")
    changed = changed.replace("SHARDS=4", "SHARDS=9").replace("=documents", "=pages")
    fleet.write_text(
        changed.replace("60Gi", "61Gi").replace("100Gi", "103Gi").replace("20Gi", "21Gi")
    )
    [[workload, pod]] = pods(build(copy / folder))
    [container] = pod["containers"]
    sizes = {
        each["name"]: each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if "emptyDir" in each
    }
    assert (sizes["tier"], sizes["weights"]) == ("61Gi", "21Gi")
    resources = container["resources"]
    assert {resources[each]["ephemeral-storage"] for each in resources} == {"103Gi"}
    assert {resources[each]["memory"] for each in resources} == {"27Gi"}
    assert resources["requests"]["cpu"] == "5"
    on_disk = sum(nbytes(size) for name, size in sizes.items() if name != "shm")
    assert on_disk <= nbytes("103Gi")
    assert nbytes(sizes["shm"]) < nbytes(resources["limits"]["memory"])
    assert nbytes(variables()["S3EC_CACHE_BYTES"]) < nbytes(variables()["TIER_VOLUME"])
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    # Kubernetes makes an emptyDir with mode 0777, which the tier refuses; so it is a folder inside.
    assert mounts[str(Path(variables()["S3EC_CACHE_DIR"]).parent)] == "tier"
    assert mounts["/dev/shm"] == "shm"
    spec = workload["spec"]
    if workload["kind"] == "Deployment":
        assert spec["replicas"] == 7
        assert resources["limits"]["nvidia.com/gpu"] == "2"
    else:
        assert (spec["completions"], spec["parallelism"]) == (9, 9)
        [source] = [each for each in pod["volumes"] if each["name"] == "source"]
        assert source["persistentVolumeClaim"]["claimName"] == "pages"
        assert mounts[variables()["SOURCE"]] == "source"


@needs_kubectl
def test_a_changed_value_starts_new_pods(copy: Path) -> None:
    before = one(build(copy), "Deployment", "vllm")
    (copy / "site/values/ec-transfer-config.json").write_text("{}")
    assert one(build(copy), "Deployment", "vllm") != before


@needs_kubectl
def test_engine_is_given_time_to_start_and_to_end(copy: Path) -> None:
    [[_, pod]] = pods(build(copy))
    [container] = pod["containers"]
    arguments = container["args"]
    wait = container["lifecycle"]["preStop"]["exec"]["command"]
    assert wait[0] == "sleep"
    ending = int(wait[1]) + int(arguments[arguments.index("--shutdown-timeout") + 1])
    # Then the connector waits for the bucket to confirm what is queued (connector/parts.py).
    drain = re.search(
        r"drain_timeout_s=4.0 if .* else (\d+)", (ROOT / "s3ec/connector/parts.py").read_text()
    )
    assert drain
    assert ending + int(drain[1]) < pod["terminationGracePeriodSeconds"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": int(arguments[arguments.index("--port") + 1])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    # One slow answer is no reason to end an engine.
    assert container["livenessProbe"]["failureThreshold"] > 1


@needs_kubectl
def test_the_engine_starts_whatever_becomes_of_hydrate(copy: Path) -> None:
    [[_, pod]] = pods(build(copy))
    [hydrate] = pod["initContainers"]
    assert hydrate["args"][0].startswith('timeout "$HYDRATE_TIME" ')
    assert hydrate["args"][0].endswith(" || true")
    [engine] = pod["containers"]
    tier = [each for each in hydrate["volumeMounts"] if each["name"] == "tier"]
    assert [each for each in engine["volumeMounts"] if each["name"] == "tier"] == tier
    choose(copy, "local-nvme")
    [[_, pod]] = pods(build(copy))
    assert [each["name"] for each in pod["initContainers"]] == ["tier-folder", "hydrate"]


@needs_kubectl
def test_engines_and_the_jobs_beside_them_share_the_folder_of_a_node(copy: Path) -> None:
    choose(copy, "local-nvme", "hydrate-nodes")
    tiers = []
    for _, pod in pods(build(copy)):
        [tier] = [each for each in pod["volumes"] if each["name"] == "tier"]
        tiers.append(tier)
        [folder] = [each for each in pod["initContainers"] if each["name"] == "tier-folder"]
        assert folder["command"][-1] == variables()["S3EC_CACHE_DIR"]
    assert len(tiers) == 2
    assert tiers[0] == tiers[1]
    assert set(tiers[0]) == {"name", "hostPath"}


@needs_kubectl
def test_labels_bring_service_budget_monitor_and_pods_together(copy: Path) -> None:
    choose(copy, "monitoring")
    resources = build(copy)
    deployment = one(resources, "Deployment", "vllm")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    service = one(resources, "Service", "vllm")
    assert service["spec"]["selector"] == labels
    monitor = one(resources, "PodMonitor", "vllm")
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    budget = one(resources, "PodDisruptionBudget", "vllm")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    ports = {each["name"] for each in container["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    dashboard = one(resources, "ConfigMap", "s3ec-dashboard")
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    [content] = dashboard["data"].values()
    assert content == (ROOT / "examples/observability/dashboard.json").read_text()


@needs_kubectl
def test_keys_come_from_secrets_and_only_gc_has_those_of_a_maintainer(copy: Path) -> None:
    choose(copy, "static-keys", "private-ca", without=("irsa",))
    for folder in (copy, *(copy / "jobs" / job for job in JOBS)):
        for workload, pod in pods(build(folder)):
            for container in containers(pod):
                refs = {
                    each["secretRef"]["name"].rpartition("-")[0]
                    for each in container["envFrom"]
                    if "secretRef" in each
                }
                gc = workload["metadata"]["name"] == "gc"
                assert refs == ({"s3-maintainer-keys"} if gc else {"s3-keys"})
                [ca] = [each for each in container["volumeMounts"] if each["name"] == "ca"]
                assert ca["mountPath"] == "/etc/s3ec"
        fleet = next(
            each
            for each in build(folder)
            if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("fleet-")
        )
        assert fleet["data"]["S3EC_CA_BUNDLE"] == "/etc/s3ec/ca.pem"


# -- llm-d -----------------------------------------------------------------------------------------


def guide(role: str, arguments: list[str]) -> Resource:
    """What the patches touch of a Deployment of llm-d's guide, at the commit named there."""
    labels = {"llm-d.ai/role": role}
    container = {
        "name": "modelserver",
        "image": "image",
        "command": ["vllm", "serve"],
        "args": [*arguments, "--ec-transfer-config", '{"ec_connector": "ECCPUConnector"}'],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": role, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def with_guide(example: Path, encode: int, decode: int) -> Path:
    """llm-d's overlay over Deployments with so many arguments before the connector's."""
    folder = example / "llm-d"
    deployments = [guide("encode", ["x"] * encode), guide("decode", ["x"] * decode)]
    (folder / "guide.yaml").write_text(yaml.safe_dump_all(deployments))
    overlay = folder / "kustomization.yaml"
    overlay.write_text(re.sub(r"- https://\S+", "- guide.yaml", overlay.read_text()))
    return folder


@needs_kubectl
def test_guide_of_llm_d_gets_our_connector(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = build(with_guide(copy, 9, 6))
    for resource in resources:
        validate(resource)
    for role, ours in (("encode", "ec_producer"), ("decode", "ec_consumer")):
        deployment = one(resources, "Deployment", role)
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        arguments = container["args"]
        transfer = json.loads(arguments[arguments.index("--ec-transfer-config") + 1])
        assert transfer == {"ec_connector": "S3ECConnector", "ec_role": ours}
        assert container["image"].startswith("registry.example/vllm-s3ec:")
    [config] = [each for each in resources if each["kind"] == "ConfigMap"]
    for name, value in config["data"].items():
        monkeypatch.setenv(name, value)
    assert load_settings({}).settings.bucket == "embeddings"


@needs_kubectl
def test_guide_of_llm_d_with_other_arguments_is_refused(copy: Path) -> None:
    with pytest.raises(AssertionError, match="args/6 failed: test failed"):
        build(with_guide(copy, 9, 7))
