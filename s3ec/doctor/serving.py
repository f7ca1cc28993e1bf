# SPDX-License-Identifier: Apache-2.0
"""Checks of the vLLM that is installed here, and of the model it is to serve."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any

from s3ec.doctor.patient import CheckContext
from s3ec.doctor.report import Outcome, fail, ok, skip, warn
from s3ec.errors import S3ECError
from s3ec.identity import Namespace
from s3ec.namespaces import (
    NamespaceInfo,
    Neighbour,
    list_namespaces,
    neighbours,
    read_namespaces,
    slug_of,
)

_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN = "s3ec"
_CONNECTOR = "S3ECConnector"
_ROLES = ("ec_producer", "ec_consumer", "ec_both")
_HOW_TO_ASK = "add vLLM's arguments: s3ec doctor ... -- --model MODEL --dtype bfloat16"
_SHOWN_DIFFERENCES = 5
_SHOWN_NAMESPACES = 5
# A bucket has a few; of one that has more than this, the first are compared.
_READ_NAMESPACES = 64


def vllm(patient: CheckContext) -> Outcome:
    """Whether vLLM imports here, and whether its version is one we know."""
    if not patient.with_vllm:
        return skip("left out by --no-vllm")
    if patient.child is None:
        return warn(
            "not installed in this environment",
            "run the doctor again where vLLM runs; looking into a corpus does without",
        )
    version = patient.child.stage("version")
    if version is None:
        return fail(
            f"installed, but does not import: {patient.child.last_words()}",
            "mend the installation until `python -c 'import vllm'` works",
        )
    found = f"version {version['version']}"
    hooks = patient.child.stage("hooks")
    if hooks is not None:
        return _by_release(found, hooks)
    words = patient.child.last_words()
    if "ec_transfer" in words:
        return fail(f"{found} has no encoder-cache connectors", "install vLLM 0.24 or later")
    return fail(f"{found}, but its modules do not import: {words}", "mend the installation")


def _by_release(found: str, hooks: Mapping[str, Any]) -> Outcome:
    supported = f"{_dotted(hooks['oldest'])} to {_dotted(hooks['newest'])}"
    release = hooks["release"]
    if release is None:
        return warn(f"{found}, a build of its own", f"s3ec is tested with {supported}")
    if release < hooks["oldest"]:
        return fail(f"{found} is too old", f"install vLLM {supported}")
    if release > hooks["newest"]:
        return warn(f"{found} is newer than s3ec knows", f"s3ec is tested with {supported}")
    return ok(f"{found}, of {supported}")


def _dotted(release: list[int]) -> str:
    return ".".join(str(part) for part in release)


def hooks(patient: CheckContext) -> Outcome:
    """Which of the connector hooks that s3ec can use this vLLM has."""
    answer = patient.child.stage("hooks") if patient.child else None
    if answer is None:
        return skip("vLLM could not be asked")
    present: Mapping[str, bool] = answer["present"]
    missing = [name for name, there in present.items() if not there]
    found = f"{len(present) - len(missing)} of {len(present)}"
    costs = [f"no {name}: {answer['costs'].get(name, 'required')}" for name in missing]
    required = [name for name in missing if name not in answer["costs"]]
    if required:
        return fail(f"{found}; {'; '.join(costs)}", "install a supported vLLM")
    if "ensure_cache_available" in missing:
        return warn(f"{found}; {'; '.join(costs)}", "a later vLLM has them")
    return ok("; ".join([found, *costs]))


def connector(patient: CheckContext) -> Outcome:
    """Whether vLLM will find S3ECConnector, by its name or by a module path."""
    named = patient.transfer.get("ec_connector", _CONNECTOR)
    if named != _CONNECTOR:
        return fail(f"ec_connector is `{named}`", f"set it to `{_CONNECTOR}`")
    role = patient.transfer.get("ec_role", _ROLES[-1])
    if role not in _ROLES:
        return fail(f"ec_role is `{role}`", f"set it to one of {', '.join(_ROLES)}")
    if patient.transfer.get("ec_connector_module_path"):
        return ok("found by ec_connector_module_path")
    by_path = 'add "ec_connector_module_path": "s3ec.connector" to --ec-transfer-config'
    if not importlib.metadata.entry_points(group=_PLUGIN_GROUP, name=_PLUGIN):
        return warn(
            f"no entry point `{_PLUGIN}` in {_PLUGIN_GROUP}",
            f"pip install s3ec into vLLM's environment, or {by_path}",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return warn(
            "VLLM_PLUGINS does not name s3ec, so vLLM will not load it",
            f"add `{_PLUGIN}` to VLLM_PLUGINS, or {by_path}",
        )
    return ok(f"vLLM finds {_CONNECTOR} by its name ({_PLUGIN_GROUP})")


def model(patient: CheckContext) -> Outcome:
    """Whether the model has an encoder cache to connect to."""
    if not patient.with_vllm:
        return skip("left out by --no-vllm")
    if patient.vllm_args is None:
        return skip("no model was named", _HOW_TO_ASK)
    answer = patient.child.stage("model") if patient.child else None
    if patient.child is None or answer is None:
        words = patient.child.last_words() if patient.child else "vLLM is not installed"
        return fail(f"vLLM does not accept these arguments: {words}", "correct them")
    found = str(answer["model"])
    if answer["ignored"]:
        found += f" (left to the server: {', '.join(answer['ignored'])})"
    if answer["problem"]:
        return fail(f"{found}: {answer['problem']}", "serve it without s3ec")
    return ok(found)


def identifiers(patient: CheckContext) -> Outcome:
    """Whether images will be known by a hash of their content."""
    answer = patient.child.stage("identifiers") if patient.child else None
    if patient.child is None or answer is None:
        return skip("vLLM could not be asked")
    if answer["problem"]:
        found, _, mend = str(answer["problem"]).rpartition("; ")
        return fail(found, mend)
    return ok("content hashes: equal images share, whatever request brings them")


def namespace(patient: CheckContext) -> Outcome:
    """Where in the bucket this model reads and writes."""
    answer = patient.child.stage("namespace") if patient.child else None
    if patient.child is None or answer is None:
        words = patient.child.last_words() if patient.child else "vLLM is not installed"
        return fail(f"the model cannot be described: {words}", "set `model_identity`, or report it")
    patient.namespace = Namespace(answer["name"], answer["descriptor"])
    facts = answer["descriptor"]
    revision = f", revision {facts['revision']}" if facts.get("revision") else ""
    weights = f", weights {facts['weights']}" if facts.get("weights") else ""
    told = f"{answer['name']} for {facts.get('model')}, {facts.get('dtype')}{revision}{weights}"
    problem = answer.get("weights_problem")
    if problem:
        return warn(
            f"{told}: {problem}",
            "run the doctor where the engine runs, once the model is there; or set `weights` = "
            "name everywhere to trust the model's name",
        )
    return ok(told)


def corpus(patient: CheckContext) -> Outcome:
    """What the bucket holds already, and why it may not be what this model reads."""
    try:
        return patient.ask_store(lambda store: _corpus(store, patient))
    except S3ECError as exc:
        return fail(str(exc), "see `bucket` and `read`")


async def _corpus(store: Any, patient: CheckContext) -> Outcome:
    names = await list_namespaces(store)
    ours = patient.namespace
    shown = ", ".join(names[:_SHOWN_NAMESPACES])
    more = f" and {len(names) - _SHOWN_NAMESPACES} more" if len(names) > _SHOWN_NAMESPACES else ""
    found = f"{len(names)} in the bucket: {shown}{more}" if names else "none in the bucket yet"
    stored = await read_namespaces(store, names[:_READ_NAMESPACES])
    if ours is None:
        return ok("; ".join([found, *_pairs(stored)]))
    near = neighbours(ours.descriptor, [one for one in stored if one.name != ours.name])
    alone = [f"{one.name} differs from it in {one.differences[0]}" for one in near if one.only]
    if ours.name in names:
        told = [f"this model's is there, 1 of {len(names)}", *alone[:_SHOWN_DIFFERENCES]]
        return ok("; ".join(told))
    alike = [one for one in near if one.only or slug_of(one.name) == slug_of(ours.name)]
    if alike:
        return _unshared(alike[0])
    undescribed = [name for name in names if slug_of(name) == slug_of(ours.name)]
    if undescribed:
        return warn(
            f"this model's is not there, but {undescribed[-1]} is, without a namespace.json",
            "serve with the same settings as the producer to share its embeddings",
        )
    if patient.only_reads:
        return warn(
            f"this model's is not there; {found}",
            "let a producer fill it first, or correct `bucket`, `prefix` and the model",
        )
    return ok(f"{found}; this model's comes with the first save")


def _unshared(nearest: Neighbour) -> Outcome:
    """This model's namespace is not there, but one that is nearly it."""
    told = "; ".join(nearest.differences[:_SHOWN_DIFFERENCES])
    rest = len(nearest.differences) - _SHOWN_DIFFERENCES
    which = "in one field alone, " if nearest.only else "in "
    return warn(
        f"this model's is not there, but {nearest.name} is, which differs {which}{told}"
        + (f"; {rest} more" if rest > 0 else ""),
        "serve with the same settings as the producer (or set `model_identity` where only "
        "the path differs) to share its embeddings",
    )


def _pairs(stored: Sequence[NamespaceInfo]) -> list[str]:
    """Namespaces that differ in one field alone: often two fleets that were meant to share."""
    described = [one for one in stored if one.descriptor]
    told = [
        f"{one.name} and {other.name} differ in `{other.only}` alone"
        for number, one in enumerate(described)
        for other in neighbours(one.descriptor, described[number + 1 :])
        if other.only
    ]
    return told[:_SHOWN_DIFFERENCES]
