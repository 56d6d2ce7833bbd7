"""What could be called in a released version can still be called, and does what it did by default."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import small_model
from transformers import BertLMHeadModel
from write_names import described

import hf_grow
from hf_grow.modeling.growable_attention import attention_sites

RELEASED = {
    f"{file.stem.removeprefix('names-')} {name}": (name, entry)
    for file in sorted(Path(__file__).parent.glob("names-*.json"))
    for name, entry in json.loads(file.read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True)
class Renamed:
    """What took the place of a released name, and a use of the old one, which must work and warn."""

    name: str
    use: Callable[[], Any]


def make_plan(**changed: Any) -> hf_grow.GrowthPlan:
    """A plan of nothing."""
    facts = {"model_type": "gpt2", "fingerprint": "", "parameters": 1, "loss": 1.0}
    return hf_grow.GrowthPlan(config=hf_grow.GrowthConfig(columns=1), collected={}, layers=[], **facts, **changed)


def make_report(**changed: Any) -> hf_grow.GrowthReport:
    """A report of nothing."""
    losses = {"loss_before": 1.0, "loss_after": 1.0, "curve": [], "predicted": {}}
    sizes = {"parameters_before": 1, "parameters_after": 1, "layers": []}
    return hf_grow.GrowthReport(form="stepped", step=1.0, config={}, collected={}, **losses, **sizes, **changed)


def use_field(make: Callable[..., Any], old: str, new: str, value: Any) -> None:
    """Give a field by its old name and read it by that."""
    made = make(**{old: value})
    assert made == make(**{new: value}) and getattr(made, old) == getattr(made, new) == value


def use_attribute(instance: Any, old: str, new: str) -> None:
    """Read an attribute by its old name."""
    assert getattr(instance, old) == getattr(instance, new)


def use_kind(change: Callable[..., Any], amount: Any) -> None:
    """Change the cross-attention of a layer, said by the old name and by the new one."""
    sizes = []
    for name in ("kind", "attention_type"):
        model = small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True)
        change(hf_grow.make_growable(model), 0, amount, **{name: "cross"})
        sizes.append([(site.attention_type, site.attention.dims) for site in attention_sites(model)])
    assert sizes[0] == sizes[1] and len({dims for _, dims in sizes[0]}) == 2


STATISTICS = hf_grow.Statistics([], hf_grow.CollectConfig(), "gpt2", 1, "", 1, 1.0, {})

# Released names that go by another one now, with the old one as a deprecated alias: "widen_value" for what is exported,
# "GrowthConfig.steps" for a field, parameter, method or property, "GrowthPlan.save.path" for a parameter of a method.
# `use` calls the old one and raises where that does not do what the new one does.
RENAMED = {
    "GrowthConfig.steps": Renamed(
        "step_scope", lambda: use_field(partial(hf_grow.GrowthConfig, columns=1), "steps", "step_scope", "per_layer")
    ),
    "GrowthPlan.steps": Renamed("step_sizes", lambda: use_field(make_plan, "steps", "step_sizes", {"columns": 2.0})),
    "GrowthReport.steps": Renamed(
        "step_sizes", lambda: use_field(make_report, "steps", "step_sizes", {"columns": 2.0})
    ),
    "Statistics.steps": Renamed("step_sizes", lambda: use_attribute(STATISTICS, "steps", "step_sizes")),
    "TrainConfig.scheduler_type": Renamed(
        "lr_scheduler_type", lambda: use_attribute(hf_grow.TrainConfig(), "scheduler_type", "lr_scheduler_type")
    ),
    "widen_query_key.kind": Renamed("attention_type", lambda: use_kind(hf_grow.widen_query_key, 1)),
    "widen_value.kind": Renamed("attention_type", lambda: use_kind(hf_grow.widen_value, 1)),
    "add_heads.kind": Renamed("attention_type", lambda: use_kind(hf_grow.add_heads, 1)),
    "drop_query_key.kind": Renamed("attention_type", lambda: use_kind(hf_grow.drop_query_key, [0])),
}


# Released names that are gone, and a use of what they did by default, which may still be said and warns.
GONE = {
    "NewWeights": None,
    "TrainConfig.new_learning_rate_multiplier": lambda: hf_grow.TrainConfig(new_learning_rate_multiplier=1.0),
    "GrowthCallback.learning_rate_multiplier": lambda: hf_grow.GrowthCallback(
        hf_grow.GrowthConfig(columns=1), hf_grow.GrowthSchedule(at=(1,)), learning_rate_multiplier=1.0
    ),
    "CollectConfig.products": lambda: hf_grow.CollectConfig(products=5),
    "CollectConfig.phases": lambda: hf_grow.CollectConfig(phases="split"),
}


def present_name(path: str) -> str:
    """What the last part of a released path is called now."""
    return RENAMED[path].name if path in RENAMED else path.rpartition(".")[2]


def parsed(text: str) -> inspect.Signature:
    """A signature as names-*.json has it."""
    return inspect.signature(eval(f"lambda {text[1:-1]}: None"))


def broken_calls(path: str, before: str, now: str) -> list[str]:
    """Why calls that were valid by the signature of before are not any more, or mean something else."""
    old, new = parsed(before).parameters, parsed(now).parameters
    old = {name: parameter for name, parameter in old.items() if f"{path}.{name}" not in GONE}
    names = {name: present_name(f"{path}.{name}") for name in old}
    problems = [
        f"{path} has lost {name}, or its place"
        for place, (name, parameter) in enumerate(old.items())
        if not _is_kept(place, names[name], parameter, new)
    ]
    for name, parameter in old.items():
        default = new[names[name]].default if names[name] in new else parameter.default
        if parameter.default not in (parameter.empty, ...) and repr(default) != repr(parameter.default):
            problems.append(f"{path} has another default for {name}")
        if parameter.default is not parameter.empty and default is parameter.empty:
            problems.append(f"{path} has no default for {name} any more")
    for name, parameter in new.items():
        if name not in names.values() and parameter.default is parameter.empty and not _is_variable(parameter):
            problems.append(f"{path} now asks for {name}")
    return problems


def _is_kept(place: int, name: str, parameter: inspect.Parameter, new: Any) -> bool:
    """Whether a parameter can be given as it could be before."""
    if name not in new:
        return False
    if _is_variable(parameter):
        return new[name].kind == parameter.kind
    if parameter.kind == parameter.KEYWORD_ONLY:
        return new[name].kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return new[name].kind == parameter.kind and list(new).index(name) == place


def _is_variable(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def broken_class(path: str, before: dict[str, Any], cls: type) -> list[str]:
    """What instances of a class lack that they had before."""
    now = described(cls)
    ancestors = {ancestor.__name__ for ancestor in cls.__mro__}
    problems = [f"{path} is no {base}" for base in _listed(before, "bases") if base not in ancestors]
    present = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for field in _listed(before, "fields"):
        if present_name(f"{path}.{field}") not in present and f"{path}.{field}" not in GONE:
            problems.append(f"{path} has no field {field}")
    for member, form in before.get("members", {}).items():
        form_now = now.get("members", {}).get(present_name(f"{path}.{member}"))
        if form_now is None or (form == "property") != (form_now == "property"):
            problems.append(f"{path}.{member} is no {'property' if form == 'property' else 'method'} any more")
        elif form != "property":
            problems += broken_calls(f"{path}.{member}", form, form_now)
    return problems


def _listed(entry: dict[str, Any], part: str) -> list[str]:
    return entry[part].split(", ") if part in entry else []


@pytest.mark.parametrize("released", [released for released, (name, _) in RELEASED.items() if name not in GONE])
def test_what_was_exported_is_there_and_can_be_called_as_before(released):
    name, before = RELEASED[released]
    assert present_name(name) in hf_grow.__all__
    value = getattr(hf_grow, present_name(name))
    now = described(value)
    assert now["kind"] == before["kind"]
    problems = broken_class(name, before, value) if before["kind"] == "class" else []
    if "signature" in before:
        problems += broken_calls(name, before["signature"], now["signature"])
    assert not problems


def test_old_names_still_work_and_warn():
    for path, renamed in RENAMED.items():
        with pytest.warns(DeprecationWarning, match=path.rpartition(".")[2]):
            renamed.use()


def test_what_is_gone_says_what_to_do_instead():
    for path, use in GONE.items():
        name = path.rpartition(".")[2]
        if use is None:
            with pytest.raises(AttributeError, match=f"{name} is gone: .*freeze_base"):
                getattr(hf_grow, name)
        else:
            with pytest.warns(DeprecationWarning, match=f"{name} is gone"):
                use()
    with pytest.raises(hf_grow.HfGrowError, match="is gone: give growth_parameters"):
        hf_grow.TrainConfig(new_learning_rate_multiplier=2.0)


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ("(model, layer, *, kind='self', **rest)", None),
        ("(model, layer, kind='self', new=1, **rest)", None),
        ("(model, layer=0, *, new=None, kind='self', **rest)", None),
        ("(model, *, layer, kind='self', **rest)", "lost layer, or its place"),
        ("(model, new=1, layer=0, *, kind='self', **rest)", "lost layer, or its place"),
        ("(model, layer, *, kind='cross', **rest)", "another default for kind"),
        ("(model, layer, *, kind, **rest)", "no default for kind any more"),
        ("(model, layer, *, form='self', **rest)", "lost kind, or its place"),
        ("(model, layer, *, new, kind='self', **rest)", "now asks for new"),
        ("(model, layer, *, kind='self')", "lost rest, or its place"),
    ],
)
def test_calls_that_would_break_are_noticed(now, problem):
    problems = broken_calls("function", "(model, layer, *, kind='self', **rest)", now)
    assert problems == [] if problem is None else problem in " ".join(problems)


def test_a_renamed_parameter_is_looked_for_by_its_new_name(monkeypatch):
    assert broken_calls("function", "(model, kind='self')", "(model, attention='self')")
    monkeypatch.setitem(RENAMED, "function.kind", Renamed("attention", lambda: None))
    assert not broken_calls("function", "(model, kind='self')", "(model, attention='self')")


def test_what_a_class_has_lost_is_noticed():
    before = {"bases": "ValueError", "fields": "steps, rate", "members": {"train": "()", "inner": "property"}}

    @dataclass
    class Now:
        steps: int

        def inner(self) -> None:
            """A method that was a property."""

    Now.__module__ = "hf_grow.test"
    problems = broken_class("Now", before, Now)
    assert [problem.split(" ", 1)[1] for problem in problems] == [
        "is no ValueError",
        "has no field rate",
        "is no method any more",
        "is no property any more",
    ]
