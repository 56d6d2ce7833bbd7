"""Options made of the fields of configs, so that a field, its default and its help are written once."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from hf_grow.cli.reading import Reader, reader_of, types_of

Config = TypeVar("Config")

# Options that are not called as their field alone; the first name is the one that sentences use.
NAMES = {
    "TrainConfig.learning_rate": ("--learning-rate", "--lr"),
    "TrainConfig.lr_schedule": ("--lr-schedule", "--schedule"),
    "GrowthConfig.step_scope": ("--step-scope", "--steps"),
    "GrowthSchedule.at": ("--grow-at",),
    "GrowthSchedule.every": ("--grow-every",),
    "GrowthSchedule.plateau": ("--grow-on-plateau",),
    "GrowthSchedule.sequences": ("--growth-sequences",),
    "Evaluation.data": ("--eval-data",),
    "Evaluation.split": ("--eval-split",),
    "Evaluation.max_sequences": ("--max-eval-sequences",),
}
# What stands for None in an option that is something else by default.
NONE = {"TrainConfig.clip": 0}
# Under which title the help lists the fields of a config.
PANELS = {
    "GrowthConfig": "How much to grow",
    "GrowthSchedule": "When to grow",
    "AdaptConfig": "Beside a frozen model",
    "TrainConfig": "Training",
    "DataConfig": "Data",
    "Evaluation": "Evaluation",
    "CollectConfig": "Measuring",
}


@dataclass(frozen=True)
class Fields:
    """Which fields of a config a command offers, all unless `only` or `hide` say otherwise, and its own defaults."""

    only: tuple[str, ...] | None = None
    hide: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigField:
    """A field of a config, as an option."""

    config: type
    name: str
    default: Any

    @property
    def full_name(self) -> str:
        """With the name of the config."""
        return f"{self.config.__name__}.{self.name}"

    @property
    def options(self) -> tuple[str, ...]:
        """What the option is called."""
        return NAMES.get(self.full_name, (f"--{self.name.replace('_', '-')}",))

    @property
    def parameter(self) -> str:
        """What typer calls the option's value."""
        return self.options[0].removeprefix("--").replace("-", "_")

    @property
    def panel(self) -> str:
        """The title under which help lists the option."""
        return PANELS[self.config.__name__]

    @property
    def hint(self) -> Any:
        """The type of the field."""
        return _hints(self.config)[self.name]

    @property
    def reader(self) -> Reader:
        """How words become a value."""
        return reader_of(self.hint)

    @property
    def help(self) -> str:
        """What the docstring says, as far as it concerns the command line, where None cannot be said."""
        text = field_help(self.config)[self.name]
        for value in self.allowed:
            text = text.replace(f'"{value}"', value)
        return text.replace("None:", "left out:") if self.default is None else re.sub(r"; None: [^;]*", "", text)

    @property
    def shown_default(self) -> str | None:
        """The default as the user would write it, None where that is to leave the option out."""
        if self.default is None or self.default is False or self.default == ():
            return None
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)

    @property
    def allowed(self) -> list[str]:
        """The names that a field of names may take: those in quotes in its help."""
        quoted = re.findall(r'"([\w+]+)"', field_help(self.config)[self.name]) if self._holds_names else []
        return quoted if len(quoted) > 1 else []

    @property
    def _holds_names(self) -> bool:
        return types_of(self.hint) in ((str,), (tuple[str, ...],))

    def read(self, words: Any) -> Any:
        """The value that the config gets."""
        value = self.reader.read(self.options[0], words)
        return None if self.full_name in NONE and value == NONE[self.full_name] else value


@dataclass(frozen=True)
class Given(Generic[Config]):
    """What the user gave for the fields of a config, for commands that make it later, or not at all."""

    config: type[Config]
    words: dict[ConfigField, Any]
    defaults: Mapping[str, Any]

    def make(self, **defaults: Any) -> Config:
        """The config: what was given, else these defaults, else those of the command, else its own."""
        return self.config(**{**self.defaults, **defaults, **self.values})

    @property
    def values(self) -> dict[str, Any]:
        """What was given, by field."""
        return {each.name: each.read(words) for each, words in self.words.items()}

    @property
    def options(self) -> dict[str, str]:
        """The options that were given, by field."""
        return {each.name: each.options[0] for each in self.words}


@dataclass(frozen=True)
class ConfigParameter:
    """A parameter of a command that is a config, or `Given` for one."""

    name: str
    config: type
    made_later: bool
    offered: Fields

    @property
    def fields(self) -> list[ConfigField]:
        """The fields that are offered."""
        defaults = {each.name: each.default for each in fields(self.config)}
        only = defaults if self.offered.only is None else self.offered.only
        wrong = {*only, *self.offered.hide, *self.offered.defaults} - {*defaults}
        if wrong:
            raise TypeError(f"{self.config.__name__} has no fields {', '.join(sorted(wrong))}.")
        return [
            ConfigField(self.config, name, self.offered.defaults.get(name, default))
            for name, default in defaults.items()
            if name in only and name not in self.offered.hide
        ]

    def value(self, values: Mapping[str, Any]) -> Any:
        """What the command gets."""
        # Flags that were not given may be False, depending on typer's version.
        words = {each: values[each.parameter] for each in self.fields}
        words = {each: value for each, value in words.items() if value is not None and value is not False}
        given: Given[Any] = Given(self.config, words, self.offered.defaults)
        return given if self.made_later else given.make()


def configs_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with options in place of its parameters that are configs, or `Given` ones; it gets these made.

    Fields of the same option in several configs are one option, whose value all of them get.
    """
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    configs = [config for name in signature.parameters if (config := _config_parameter(name, hints[name]))]
    made = {config.name for config in configs}
    own = [parameter for name, parameter in signature.parameters.items() if name not in made]

    @wraps(command)
    def run(**values: Any) -> None:
        kept = {parameter.name: values[parameter.name] for parameter in own}
        command(**kept, **{config.name: config.value(values) for config in configs})

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = signature.replace(parameters=[*own, *_options(configs)])  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in inspect.signature(run).parameters.items()}
    return run


@cache
def field_help(config: type) -> dict[str, str]:
    """What the docstring of a config says of each field, in entries `name  text` or `one, another  text`."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(config) or "").splitlines()[1:]:
        if entry := re.fullmatch(r"(\w+(?:, \w+)*)(?:  +(.*))?", line):
            names, line = entry[1].split(", "), entry[2] or ""
        for name in names:
            entries[name] = f"{entries.get(name, '')} {line.strip()}".strip()
    return {each.name: entries[each.name] for each in fields(config)}


def _config_parameter(name: str, hint: Any) -> ConfigParameter | None:
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    offered = next((mark for mark in marks if isinstance(mark, Fields)), Fields())
    made_later = get_origin(base) is Given
    config = get_args(base)[0] if made_later else base
    return ConfigParameter(name, config, made_later, offered) if is_dataclass(config) else None  # type: ignore[arg-type]


def _options(configs: list[ConfigParameter]) -> list[inspect.Parameter]:
    """The options of all fields, in order; those of fields with the same option together."""
    sources: dict[str, list[ConfigField]] = {}
    for each in (each for config in configs for each in config.fields):
        sources.setdefault(each.parameter, []).append(each)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(*same))
        for name, same in sources.items()
    ]


def _annotation(first: ConfigField, *others: ConfigField) -> Any:
    """What typer makes an option of; it has no default, so that what was given can be told."""
    option = typer.Option(
        *first.options,
        help=escape(_help(first, *others)),
        rich_help_panel=first.panel,
        show_default=first.shown_default or False,
        metavar=first.reader.metavar,
    )
    # Fields that read the same words differently get them as text.
    same = all(other.reader.typed is first.reader.typed for other in others)
    return Annotated[(first.reader.typed if same else str) | None, option]


def _help(first: ConfigField, *others: ConfigField) -> str:
    """What the first config says of a field, and what others say differently, with the title of their panel."""
    # Names that can be given stay as they are.
    named = first.help.startswith(tuple(first.allowed))
    sentences = [f"{first.help if named else first.help[:1].upper() + first.help[1:]}."]
    for other in others:
        if other.help != first.help:
            differs = other.shown_default not in (None, first.shown_default)
            default = f" ({other.shown_default} by default)" if differs else ""
            sentences.append(f"{other.panel}: {other.help}{default}.")
    if first.allowed and ", ".join(first.allowed) not in first.help:
        several = types_of(first.hint) == (tuple[str, ...],)
        sentences.append(f"{'Some' if several else 'One'} of {', '.join(first.allowed)}.")
    return " ".join(sentences)


@cache
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)
