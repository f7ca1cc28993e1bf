# SPDX-License-Identifier: Apache-2.0
"""No processor of the installed vLLM makes an item's form depend on its prompt without our knowing.

The sources are read and not imported: some models need what is not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from s3ec.connector import forms

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

# Functions that look at how many items a prompt has, and what they do with that: no item has
# another form by it.
LOOKED_AT = {
    ("dots3_note", "__call__"): "refuses a second video",
    ("fireredasr2", "__call__"): "the plural in an error message",
    ("funasr", "__call__"): "the plural in an error message",
    ("moss_transcribe_diarize", "_add_vllm_audio_metadata"): "which chunk belongs to which sound",
    ("muse_glimmer", "get_num_frames_with_most_features"): "a size for the memory profile",
    ("qwen3_asr", "_call_hf_processor"): "one call for each sound, so that padding cannot matter",
}
_COUNT = re.compile(r"(num|n)_(images|imgs|videos|audios)|(image|video|audio)s?_count")
_ITEMS = re.compile(r"(images|imgs|image_list|images_list|pil_images|videos|audios|media_list)")
# A budget that the items of a prompt share.
_BUDGET = re.compile(r"(tokens|pixels|patches)_(available|left)\w*|available_(tokens|pixels)\w*")
# Whose methods may share something among the items of a prompt.
_PROCESSOR = re.compile(r"Process|Tiler")
_LISTED = forms.FORMS.keys() | forms.ONE_FORM.keys()
# A file without any of these is not parsed, which takes most of the time.
_WORTH_IT = re.compile(
    rf"def {forms.HOOK}\b|class \w*({_PROCESSOR.pattern})|class ({'|'.join(_LISTED)})\b"
)


def _root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@dataclass(frozen=True)
class _Method:
    """A method of a class in vLLM's models and processors.

    Attributes:
        couples: It is a processor's, and shares something among the items of a prompt.
    """

    model: str
    cls: str
    name: str
    couples: bool


@cache
def _methods() -> list[_Method]:
    """Those of files that may hold what is looked for; read once, since that takes seconds."""
    return [
        _Method(_name(path), cls.name, method.name, _is_coupling(cls, method))
        for path in _paths()
        if _WORTH_IT.search(text := path.read_text())
        for cls, method in _methods_of(ast.parse(text))
    ]


def _paths() -> Iterator[Path]:
    root = _root()
    for pattern in (
        "model_executor/models/**/*.py",
        "models/**/*.py",
        "transformers_utils/processors/*.py",
    ):
        yield from sorted(root.glob(pattern))


def _name(path: Path) -> str:
    """The model's: what is below ``models`` has a folder for each."""
    parts = path.relative_to(_root()).parts
    return parts[1] if parts[0] == "models" else path.stem


def _methods_of(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            for method in cls.body:
                if isinstance(method, ast.FunctionDef):
                    yield cls, method


def _counts(node: ast.expr) -> bool:
    """Whether an expression is how many items there are."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            return _ITEMS.fullmatch(_last(node.args[0])) is not None
        return _last(node.func) == "get_count"
    return _COUNT.fullmatch(_last(node)) is not None


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_several(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= 1


def _is_coupling(cls: ast.ClassDef, method: ast.FunctionDef) -> bool:
    return bool(_PROCESSOR.search(cls.name)) and any(map(_couples, ast.walk(method)))


def _couples(node: ast.AST) -> bool:
    """Whether code asks for a number of items beyond none, divides by it, or shares a budget."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(_counts, sides)) and any(map(_is_several, sides))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
        return any(_counts(one) for one in ast.walk(node.right) if isinstance(one, ast.expr))
    return isinstance(node, ast.Name) and _BUDGET.search(node.id) is not None


def test_every_processor_that_goes_around_vllms_cache_is_known() -> None:
    definers = {method.cls for method in _methods() if method.name == forms.HOOK}
    assert definers, "vLLM calls that method otherwise now; see forms.HOOK"
    assert definers <= _LISTED


def test_every_processor_that_counts_the_items_of_a_prompt_is_known() -> None:
    known = {method.model for method in _methods() if method.cls in _LISTED}
    # What makes a size for the memory profile is no processor.
    found = {(method.model, method.name) for method in _methods() if method.couples}
    left = {one for one in found if one[0] not in known and one not in LOOKED_AT}
    assert not left, "does an item have another form there? See s3ec/connector/forms.py"


def test_what_the_table_names_is_there_or_was() -> None:
    """A class that vLLM renames would fall out of the table unseen."""
    assert forms.FORMS.keys() <= {method.cls for method in _methods()}
