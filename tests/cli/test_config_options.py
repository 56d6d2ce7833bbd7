"""Options made of config fields: names, help, values, defaults, and what the commands get."""

import inspect
import json
import re
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer

import hf_grow
from hf_grow import AdaptConfig, CollectConfig, Evaluation, GrowthConfig, GrowthSchedule, HfGrowError, TrainConfig
from hf_grow.cli import analyze, finetune, grow
from hf_grow.cli.config_options import ConfigField, Fields, Given, configs_as_options, field_help
from hf_grow.data import DataConfig

CONFIGS = (AdaptConfig, CollectConfig, DataConfig, Evaluation, GrowthConfig, GrowthSchedule, TrainConfig)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)


def call(command, *words):
    """What a command gets, called with these words."""
    got = {}

    def keep(**values):
        got.update(values)

    keep.__signature__, keep.__annotations__ = inspect.signature(command), command.__annotations__
    app = typer.Typer()
    app.command()(configs_as_options(keep))
    app([str(word) for word in words], standalone_mode=False)
    return got


@every_config
def test_every_field_has_help_and_no_help_is_of_nothing(config):
    names = [field.name for field in fields(config)]
    assert list(field_help(config)) == names and all(field_help(config).values())


@every_config
def test_the_values_that_help_lists_are_those_that_the_config_takes(config):
    required = {"columns": 1} if config is GrowthConfig else {"every": 1} if config is GrowthSchedule else {}
    for field in fields(config):
        try:
            config(**{**required, field.name: "?"})
            refused = ""
        except HfGrowError as error:
            refused = str(error)
        values = re.fullmatch(rf"{field.name} must be one of (.*), not '[?]'[.]", refused)
        listed = ConfigField(config, field.name, field.default).allowed
        assert listed == (values[1].split(", ") if values else []), field.name


def test_a_command_gets_configs_of_what_was_given_and_defaults_elsewhere():
    def command(name: str, train: TrainConfig, data: Annotated[DataConfig, Fields(defaults={"max_sequences": 9})]): ...

    words = ("--batch-size", 3, "--lr", "0.1", "--schedule", "cosine", "--betas", "0.5,0.9", "--gradient-checkpointing")
    got = call(command, "me", *words, "--seed", 0, "--text-column", "a,b")
    changed = {"learning_rate": 0.1, "lr_schedule": "cosine", "betas": (0.5, 0.9), "gradient_checkpointing": True}
    assert got["name"] == "me" and got["train"] == TrainConfig(batch_size=3, **changed)
    # One option feeds all configs with such a field.
    assert got["data"] == DataConfig(batch_size=3, text_column="a,b", max_sequences=9)
    assert call(command, "me") == {"name": "me", "train": TrainConfig(), "data": DataConfig(max_sequences=9)}
    assert call(command, "me", "--clip", 0)["train"].clip is None


def test_a_config_can_be_made_later_and_tells_what_was_given():
    def command(
        growth: Given[GrowthConfig], recipe: Annotated[Given[AdaptConfig], Fields(hide=("collect", "method"))]
    ): ...

    got = call(command, "--columns", "0:8,3:4", "--step-size", 0)
    growth, recipe = got["growth"], got["recipe"]
    assert growth.options == recipe.options == {"columns": "--columns", "step_size": "--step-size"}
    assert growth.make() == GrowthConfig(columns={0: 8, 3: 4}, step_size=0.0)
    assert growth.make(align=2, step_size=1.0) == GrowthConfig(columns={0: 8, 3: 4}, step_size=0.0, align=2)
    with pytest.raises(HfGrowError, match="--columns must be made of whole numbers"):
        recipe.make()
    got = call(command, "--columns", 8, "--kinds", "value_columns, columns,")
    assert got["recipe"].make(method="grow") == AdaptConfig(method="grow", columns=8)
    assert call(command)["growth"].values == {}


def test_errors_are_the_sentences_of_the_configs():
    def command(growth: GrowthConfig): ...

    for words, message in (((), "Say how much to grow"), (("--columns", 1, "--line-search", "no"), "one of low_rank")):
        with pytest.raises(HfGrowError, match=message):
            call(command, *words)


def test_what_no_option_can_be_made_of_is_refused_when_the_command_is_made():
    def unknown(growth: Annotated[GrowthConfig, Fields(hide=("colums",))]): ...

    def nested(recipe: AdaptConfig): ...

    for command, message in ((unknown, "GrowthConfig has no fields colums"), (nested, "of type .*CollectConfig")):
        with pytest.raises(TypeError, match=message):
            configs_as_options(command)


def test_help_of_several_names_goes_to_all_of_them():
    @dataclass
    class Sizes:
        """How large.

        width, height  in metres,
                       or none
        depth
            below
        """

        width: int = 1
        height: int = 1
        depth: int = 1

    assert field_help(Sizes) == {"width": "in metres, or none", "height": "in metres, or none", "depth": "below"}


def test_commands_have_few_parameters_and_all_options():
    for command, most in ((finetune.finetune, 20), (grow.grow, 15), (analyze.analyze, 10)):
        options = inspect.signature(command).parameters
        assert len(inspect.signature(command.__wrapped__, follow_wrapped=False).parameters) <= most
        assert {"seed", "length", "columns", "value_columns"} <= options.keys()


def test_new_options_reach_the_collection(run, tmp_path):
    (tmp_path / "data.txt").write_text("some words to read, " * 60)
    options = {"held_out": 0.4, "inverse": "pinv", "passes": 4, "oversampling": 2, "cutoff": 1e-5}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    size = ("--length", 16, "--max-sequences", 8, "--kinds", "columns", "--json")
    printed = run("analyze", hf_grow.SMALL_MODEL, "--data", tmp_path / "data.txt", *size, *words)
    config = json.loads(printed)["config"]
    assert {name: config[name] for name in options} == options
