# SPDX-License-Identifier: Apache-2.0
"""What lies in examples/kubernetes/ holds together; it is not applied to a cluster here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.config import load_settings
from s3ec.identity import Namespace
from s3ec.namespaces import slug_of
from s3ec.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


def nbytes(quantity: str) -> int:
    """Of Kubernetes' ``60Gi``."""
    return int(TypeAdapter(ByteSize).validate_python(f"{quantity}B"))


DEPLOYMENT = read("deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
[INIT] = POD["initContainers"]
ENV = {one["name"]: one for one in CONTAINER["env"]}
MOUNTS = {one["mountPath"]: one["name"] for one in CONTAINER["volumeMounts"]}
VOLUMES = {one["name"]: one["emptyDir"] for one in POD["volumes"]}


def argument(name: str) -> str:
    value: str = CONTAINER["args"][CONTAINER["args"].index(name) + 1]
    return value


def test_settings_are_what_the_connector_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: one["value"] for name, one in ENV.items() if name.startswith(ENV_PREFIX)}
    assert ours
    for name, value in ours.items():
        assert name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields
        monkeypatch.setenv(name, value)
    transfer = json.loads((FOLDER / "ec-transfer-config.json").read_text())
    assert transfer["ec_connector"] == "S3ECConnector"
    loaded = load_settings(transfer["ec_connector_extra_config"])
    assert {origin for origin in loaded.origins.values() if origin.startswith("env ")} == {
        f"env {name}" for name in ours
    }


def test_tier_lies_in_a_volume_that_it_cannot_outgrow() -> None:
    # Kubernetes makes an emptyDir with mode 0777, which the tier refuses.
    tier = VOLUMES[MOUNTS[str(Path(ENV["S3EC_CACHE_DIR"]["value"]).parent)]]
    cache_bytes = TypeAdapter(ByteSize).validate_python(ENV["S3EC_CACHE_BYTES"]["value"])
    assert cache_bytes < nbytes(tier["sizeLimit"])
    on_disk = [one for one in VOLUMES.values() if one.get("medium") != "Memory"]
    total = sum(nbytes(one["sizeLimit"]) for one in on_disk)
    resources = CONTAINER["resources"]
    assert total <= nbytes(resources["requests"]["ephemeral-storage"])
    assert total <= nbytes(resources["limits"]["ephemeral-storage"])


def test_the_tier_is_filled_where_the_engine_looks_for_it_and_the_engine_starts_anyway() -> None:
    assert INIT["image"] == CONTAINER["image"]
    assert all(one in CONTAINER["volumeMounts"] for one in INIT["volumeMounts"])
    assert all(ENV[one["name"]] == one for one in INIT["env"])
    [command] = INIT["args"]
    assert command.startswith("timeout 15m s3ec hydrate ")
    assert command.endswith(" || true")
    known = CliRunner().invoke(app, ["hydrate", "--help"], env={"COLUMNS": "200"}).stdout
    options = re.findall(r"--[a-z-]+", command)
    assert options
    assert all(one in known for one in options)
    # As the namespace of the engine's model spells it.
    assert re.search(r"--model (\S+)", command)[1] in slug_of(  # type: ignore[index]
        Namespace.from_descriptor({"model": argument("--model")}).name
    )


def test_shared_memory_is_in_memory_and_below_the_limit() -> None:
    shm = VOLUMES[MOUNTS["/dev/shm"]]
    assert shm["medium"] == "Memory"
    assert nbytes(shm["sizeLimit"]) < nbytes(CONTAINER["resources"]["limits"]["memory"])


def test_pod_has_more_time_to_end_than_the_engine_takes() -> None:
    command = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    needed = int(command[1]) + int(argument("--shutdown-timeout"))
    assert needed < POD["terminationGracePeriodSeconds"]


def test_probes_ask_the_engine_and_give_it_time_to_start() -> None:
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert ports == {"http": int(argument("--port"))}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    # One slow answer is no reason to end an engine.
    assert CONTAINER["livenessProbe"]["failureThreshold"] > 1


def test_labels_bring_service_monitor_and_pods_together() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    service = read("service.yaml")
    assert service["spec"]["selector"] == labels
    monitor = read("podmonitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    ports = {one["name"] for one in CONTAINER["ports"]}
    assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    assert endpoint["path"] == "/metrics"
    assert monitor["metadata"]["namespace"] == read("kustomization.yaml")["namespace"]


def test_no_variable_of_a_service_is_taken_for_one_of_vllm() -> None:
    assert read("service.yaml")["metadata"]["name"] == "vllm"  # VLLM_PORT, VLLM_SERVICE_HOST
    assert POD["enableServiceLinks"] is False


def test_secrets_come_from_secrets() -> None:
    assert set(ENV["HF_TOKEN"]["valueFrom"]) == {"secretKeyRef"}
    readme = (FOLDER / "README.md").read_text()
    secret = ENV["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert f"secret generic {secret['name']} --from-literal={secret['key']}=" in readme
    literal = {name for name, one in ENV.items() if "value" in one}
    assert not {name for name in literal if re.search("TOKEN|KEY|SECRET|PASSWORD", name)}


def test_account_is_the_one_that_terraforms_examples_make_a_role_for() -> None:
    account = read("serviceaccount.yaml")
    name, namespace = account["metadata"]["name"], read("kustomization.yaml")["namespace"]
    assert POD["serviceAccountName"] == name
    role = account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
    assert re.fullmatch(r"arn:aws:iam::\d{12}:role/embeddings-engines", role)
    examples = ROOT / "terraform" / "examples"
    assert "${var.name}-engines" in (examples / "complete" / "main.tf").read_text()
    wanted = f'{{ namespace = "{namespace}", service_account = "{name}" }}'
    assert wanted in (examples / "cross-region" / "variables.tf").read_text()


def test_config_map_and_files_are_the_ones_of_the_kustomization() -> None:
    kustomization = read("kustomization.yaml")
    for name in kustomization["resources"]:
        assert (FOLDER / name).is_file()
    [generated] = kustomization["configMapGenerator"]
    reference = ENV["EC_TRANSFER_CONFIG"]["valueFrom"]["configMapKeyRef"]
    assert (reference["name"], [reference["key"]]) == (generated["name"], generated["files"])
    assert argument("--ec-transfer-config") == "$(EC_TRANSFER_CONFIG)"


def test_every_file_of_the_example_is_named_in_its_readme() -> None:
    text = (FOLDER / "README.md").read_text()
    names = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_builds_it() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER], check=True, capture_output=True, text=True
    )
    made = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert set(made) == {"ServiceAccount", "ConfigMap", "Service", "Deployment"}
    [container] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    [config] = [one for one in container["env"] if one["name"] == "EC_TRANSFER_CONFIG"]
    # The name with its hash: a changed setting is another name, so pods start anew.
    assert config["valueFrom"]["configMapKeyRef"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert made["ConfigMap"]["metadata"]["name"] != "s3ec"
