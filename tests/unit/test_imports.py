# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: down only, and torch and vLLM only where tensors and engines are."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "s3ec"

BENCH = PACKAGE / "cli" / "bench.py"  # the one way from what is installed to s3ec.dev

# From the bottom up. A part imports from lower layers and from itself, never from beside or above.
LAYERS = [
    {"errors", "payoff", "decoding", "__init__"},
    {"tenant", "weights", "counters", "spans", "trial"},
    {"settings", "runtime", "managers"},
    {"identity", "config", "store"},
    {"safetensors_file"},
    {"codec"},
    {"tier", "modality"},
    {"index"},
    {"fetch", "fill", "namespaces", "encode_costs"},
    {"prefetch"},
    {"node"},
    {"connector"},
    {"corpus"},  # a job over a corpus starts an engine with the connector
    {"client", "middleware"},
    {"testing"},
    {"doctor"},
    {"cli"},
    {"dev", "__main__"},
]
LAYER_OF = {part: number for number, layer in enumerate(LAYERS) for part in layer}

# Part: whether its import may run when the module is imported ("anywhere") or only inside of a
# function that is called where the library is ("inside").
MAY_IMPORT = {
    "torch": {"connector": "anywhere", "corpus": "inside", "dev": "anywhere"},
    "vllm": {
        **dict.fromkeys(("connector", "dev", "managers"), "anywhere"),
        **dict.fromkeys(("corpus", "doctor", "middleware"), "inside"),
    },
    "transformers": {"connector": "inside", "dev": "inside"},
    "aioboto3": {"store": "anywhere"},
    "aiobotocore": {"store": "anywhere"},
    "aiohttp": {"store": "anywhere"},
    "obstore": {"store": "anywhere", "dev": "inside"},
    "duckdb": {},
    "pyarrow": dict.fromkeys(("cli", "client", "corpus", "middleware", "dev"), "inside"),
    "pypdfium2": {"corpus": "inside"},
    "ray": {"corpus": "inside", "dev": "inside"},
    "redis": {"store": "inside"},
}  # fmt: skip
# Within these packages one module alone may import what the rest may not.
SDK_MODULES = {"store", "doctor", "testing", "dev"}  # botocore and boto3


@dataclass(frozen=True)
class Import:
    """One import statement."""

    module: Path
    line: int
    target: str
    inside: bool  # of a function
    typing_only: bool

    @property
    def part(self) -> str:
        return part_of(self.module.relative_to(PACKAGE).with_suffix("").parts)

    def __str__(self) -> str:
        return f"{self.module.relative_to(REPOSITORY)}:{self.line} imports {self.target}"


def part_of(names: tuple[str, ...]) -> str:
    return names[0] if names else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(
    node: ast.AST, module: Path, *, inside: bool = False, typing_only: bool = False
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, child.lineno, alias.name, inside, typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}: a relative import"
            for alias in child.names:
                target = f"{child.module}.{alias.name}"
                yield Import(module, child.lineno, target, inside, typing_only)
        else:
            yield from walk(
                child,
                module,
                inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef),
                typing_only=typing_only or is_type_checking(child),
            )


@functools.cache
def imports() -> list[Import]:
    """Of all modules; when a test asks, since each process of a run collects all tests."""
    return [
        found
        for module in sorted(PACKAGE.rglob("*.py"))
        for found in walk(ast.parse(module.read_text()), module)
    ]


def test_every_part_has_its_layer() -> None:
    parts = {
        part_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    assert parts - set(LAYER_OF) == set()
    assert len(imports()) > 300


def test_imports_point_down() -> None:
    wrong = []
    for each in imports():
        if each.target.split(".")[0] != "s3ec":
            continue
        below = part_of(tuple(each.target.split(".")[1:]))
        below = below if below in LAYER_OF else "__init__"  # a name of the package itself
        if each.part == "__init__" and each.typing_only:
            continue  # what it imports with the first use
        if below == "dev" and each.module == BENCH and each.inside:
            continue
        if below != each.part and LAYER_OF[below] >= LAYER_OF[each.part]:
            wrong.append(str(each))
    assert wrong == []


def test_no_job_imports_the_corpus() -> None:
    """A job is a function of a store and a layout; the class calls the jobs."""
    its_own = {PACKAGE / "corpus" / "corpus.py", PACKAGE / "corpus" / "__init__.py"}
    wrong = [
        str(each)
        for each in imports()
        if each.part == "corpus"
        and each.module not in its_own
        and each.target.startswith(("s3ec.corpus.corpus", "s3ec.corpus.Corpus"))
    ]
    assert wrong == []


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_heavy_libraries_stay_where_they_belong(library: str) -> None:
    allowed = MAY_IMPORT[library]
    wrong = [
        str(each)
        for each in imports()
        if each.target.split(".")[0] == library and not each.typing_only
        if not (allowed.get(each.part) == "anywhere" or (each.part in allowed and each.inside))
    ]
    assert wrong == []


def test_the_sdk_stays_behind_the_store_and_the_doctor() -> None:
    wrong = [
        str(each)
        for each in imports()
        if each.target.split(".")[0] in ("boto3", "botocore") and each.part not in SDK_MODULES
    ]
    assert wrong == []


def test_the_extra_transport_is_one_module() -> None:
    """aioboto3 is not installed with s3ec, nor is what it brings."""
    extra = {"aioboto3", "aiobotocore", "aiohttp"}
    modules = {each.module.name for each in imports() if each.target.split(".")[0] in extra}
    assert modules == {"aioboto3_s3.py"}


def test_tests_are_not_imported() -> None:
    assert [str(each) for each in imports() if each.target.split(".")[0] == "tests"] == []


def test_private_names_stay_in_their_part() -> None:
    wrong = []
    for each in imports():
        names = each.target.split(".")
        foreign = names[0] == "s3ec" and each.part not in names
        if foreign and any(name.startswith("_") and name != "__version__" for name in names):
            wrong.append(str(each))
    assert wrong == []


# -- really imported ---------------------------------------------------------------------------

BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "transformers"):
            raise AssertionError(f"imports {name}")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(sys.modules))
"""


def modules_after(*names: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def ours_after(name: str) -> set[str]:
    """Modules of s3ec that an import brings; `make setup` has the interpreter start with some."""
    loaded = modules_after(name) - (modules_after() - {"s3ec"})
    return {module for module in loaded if module.split(".")[0] == "s3ec"}


@pytest.mark.slow
def test_everything_but_the_engine_side_works_without_torch_and_vllm() -> None:
    packages = ("cli", "client", "store", "tier", "index", "doctor", "testing")
    names = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for package in packages
        for path in sorted((PACKAGE / package).rglob("*.py"))
    ]
    assert len(names) > 30
    light = ("messages", "scheduler", "vllm_config", "plugin")
    modules_after(*names, "s3ec.node", *(f"s3ec.connector.{name}" for name in light))


def test_importing_the_package_imports_nothing_else() -> None:
    """torch and vLLM load it in every process."""
    assert ours_after("s3ec") == {"s3ec"}


def test_the_corpus_comes_with_its_first_use_and_without_what_is_heavy() -> None:
    code = "import s3ec, sys; s3ec.Corpus; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    loaded = set(done.stdout.split())
    assert "s3ec.corpus" in loaded
    heavy = {"torch", "vllm", "boto3", "botocore", "obstore"}
    assert not heavy & (loaded - modules_after())


def test_the_plugin_is_light() -> None:
    """vLLM calls it in every process, also in those that never see a bucket."""
    assert ours_after("s3ec.connector.plugin") == {
        "s3ec",
        "s3ec.connector",
        "s3ec.connector.plugin",
    }
    loaded = modules_after("s3ec.connector.plugin")
    assert not {"botocore", "pydantic", "aiohttp"} & loaded


def test_the_middleware_is_light() -> None:
    """vLLM's API server imports it, beside its own."""
    module = "s3ec.middleware.client_ids"
    shared = {"s3ec", "s3ec.errors", "s3ec.middleware", "s3ec.middleware.bodies"}
    assert ours_after(module) == {*shared, module}
    assert not {"botocore", "pydantic", "starlette"} & modules_after(module)


@pytest.mark.slow
def test_the_save_queue_does_not_import_vllm() -> None:
    """Which takes many seconds, starts threads, and is not needed to save from the CPU."""
    pytest.importorskip("torch")
    code = "import sys, s3ec.connector.saves; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
