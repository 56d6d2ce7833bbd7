"""Rules about the source itself: imports point one way, and what travels with checkpoints is self-contained."""

import ast
import re
from pathlib import Path

import pytest

from hf_grow.families import FAMILIES

PACKAGE = Path(__file__).parents[1] / "hf_grow"
# Each may import those before it, and files of its own rank.
RANKS = [
    {"errors", "folders"},
    {"modeling", "linalg", "optimizer_state"},
    {"blocks"},
    {"config", "families", "assets", "model_card", "report"},
    {"statistics", "observe"},
    {"patch", "passes", "base", "new_weights", "sharding"},
    {"adapt_config", "train_config", "feed", "data", "sequences"},
    {"structure", "growth", "probes", "estimators"},
    {"line_search", "collector", "proposal"},
    {"calibrate", "exact", "sketch", "plan"},
    {"collect"},
    {"insert"},
    {"schedule", "distributed"},
    {"training_setup"},
    {"callback", "resume"},
    {"growth_file", "checkpoint", "figures", "html_report"},
    {"run_state", "recipe"},
    {"trainer"},
    {"finetuning"},
    {"cli", "__init__", "__main__"},
]


def rank(part):
    """The place of a module in the order of imports."""
    return next(index for index, names in enumerate(RANKS) if part in names)


def imports(file):
    """Absolute names of modules a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 15
    for file in files:
        here = rank(file.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for name in imports(file):
            if name.startswith("hf_grow."):
                assert rank(name.split(".")[1]) <= here, f"{file.name} imports {name}"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_modelling_files_travel_alone(family):
    travelling = {name.removesuffix(".py") for name in family.code_files}
    allowed = {"torch", "transformers", *__import__("sys").stdlib_module_names}
    for name in family.code_files:
        for imported in imports(PACKAGE / "modeling" / name):
            if imported.startswith("."):
                assert imported.removeprefix(".") in travelling, f"{name} imports {imported}"
            else:
                assert imported.partition(".")[0] in allowed, f"{name} imports {imported}"


def test_every_modelling_file_belongs_to_a_family():
    files = {file.name for file in (PACKAGE / "modeling").glob("*.py")} - {"__init__.py"}
    assert files == {name for family in FAMILIES.values() for name in family.code_files}


def test_no_file_names_a_host_or_a_home_folder():
    pattern = re.compile(r"https?://(?!127\.0\.0\.1|localhost)|/home/|/root/")
    for file in PACKAGE.rglob("*.py"):
        assert not pattern.search(file.read_text(encoding="utf-8")), file
