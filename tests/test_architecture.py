"""Rules about the source itself: imports point one way, and what travels with checkpoints is self-contained."""

import ast
import re

import pytest
from processes import ROOT, TESTS

from hf_grow.growth.kinds import KINDS
from hf_grow.surgery.families import FAMILIES

PACKAGE = ROOT / "hf_grow"
# Each imports only those before it, and what is its own.
ORDER = [
    "errors",
    "linalg",
    "files",
    "fields",
    "progress",
    "modeling",
    "assets",
    "surgery",
    "running",
    "measuring",
    "growth",
    "saving",
    "training",
    "adapting",
    "data",
    "reporting",
    "finetuning",
    "cli",
    "__init__",
    "__main__",
]


def imports(file):
    """Absolute names of modules a file imports, and of what it takes from the package itself."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "hf_grow":
            yield from (f"hf_grow.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def place_in_order(name):
    """Of what a name below hf_grow belongs to; what is no part of it is exported by the package itself."""
    part = name.removeprefix("hf_grow").strip(".").split(".")[0]
    return ORDER.index(part if part in ORDER else "__init__")


def test_imports_point_one_way():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 15
    wrong = []
    for file in files:
        own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for name in imports(file):
            if name.split(".")[0] == "hf_grow" and place_in_order(name) > place_in_order(own):
                wrong.append(f"{own} imports {name}")
    assert not wrong


def test_every_part_has_its_place_in_the_order():
    present = {place.stem for place in PACKAGE.iterdir() if place.suffix == ".py" or (place / "__init__.py").exists()}
    assert present == set(ORDER)


def test_no_test_module_imports_another():
    """What several of them share is in modules that hold no tests."""
    modules = list(TESTS.rglob("test_*.py"))
    assert len(modules) > 30
    names = {file.stem for file in modules}
    for file in TESTS.rglob("*.py"):
        assert not {name.rpartition(".")[2] for name in imports(file)} & names, file


def test_folders_of_tests_are_called_like_the_packages_they_test():
    folders = {file.parent.name for file in TESTS.glob("*/test_*.py")}
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    # Files of released versions concern all packages.
    assert "growth" in folders and folders <= packages | {"released"}


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
    assert len(known) > 40 and not late


def test_no_module_but_the_kinds_compares_a_kind_with_a_string():
    names = {*KINDS, "head_scores"}
    for file in PACKAGE.rglob("*.py"):
        if "kinds" not in file.parts:
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                constants = [part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)]
                assert not names & {*constants}, f"{file}:{node.lineno}"


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
