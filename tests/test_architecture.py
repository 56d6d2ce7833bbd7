"""Rules about the source itself: imports point one way, and what travels with checkpoints is self-contained."""

import ast
import re
from pathlib import Path

import pytest

from hf_grow.surgery.families import FAMILIES

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
    {"calibrate", "exact", "sketch", "sketch_circuits", "sketch_scores", "plan"},
    {"collect"},
    {"insert"},
    {"schedule", "distributed"},
    {"training_setup", "training_checks", "wrapping"},
    {"callback", "resume"},
    {"growth_file", "checkpoint", "figures", "html_report"},
    {"run_state", "recipe"},
    {"prepared_run"},
    {"run"},
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


# Still to be mended; this set is to vanish.
BORN_LATE = {("SketchCollector", "grams"), ("SketchCollector", "all_sides")}


def classes():
    """All classes outside of modeling, which follows transformers."""
    for file in PACKAGE.rglob("*.py"):
        if "modeling" not in file.parts:
            yield from (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ClassDef))


def own_attributes(method):
    """The attributes of itself that a method assigns."""
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id == "self" else []


def given_at_birth(class_node):
    """The attributes that an object has once it is made: fields, and what the constructor assigns."""
    for node in class_node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__"):
            yield from own_attributes(node)


def test_objects_are_whole_from_the_start():
    """No attribute is born in a method other than the constructor, of the class or of one it inherits from."""
    known = {node.name: node for node in classes()}
    late = set()
    for node in known.values():
        lineage, born = [node], set()
        while lineage:
            ancestor = lineage.pop()
            born |= set(given_at_birth(ancestor))
            lineage += [known[base.id] for base in ancestor.bases if isinstance(base, ast.Name) and base.id in known]
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        assigned = {name for method in methods for name in own_attributes(method)}
        late |= {(node.name, name) for name in assigned - born}
    assert len(known) > 40 and not late - BORN_LATE


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
