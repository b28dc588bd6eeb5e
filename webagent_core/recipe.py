"""Recipes: one YAML file a paper, every number with where it comes from.

A recipe file has a `type`, the method's name, and sections of settings. A setting is a plain value, or a mapping that
says where the value comes from, one entry a source:

    learning_rate: {paper: 1e-6, released: 5e-7}     # the paper and its authors' code differ
    group_size: {paper: undisclosed, released: 4}    # the paper does not say
    updates: {ours: 30}

Preset "paper" takes the first of paper, ours, released that is there and disclosed; preset "released" the first of
released, paper, ours. `profiles` hold sections that replace settings, e.g. `embedded` for a laptop. A file of your own
needs no more than `type` and what it changes: the rest is the shipped recipe of that type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SOURCES = ("paper", "released", "ours")
ORDER = {"paper": ("paper", "ours", "released"), "released": ("released", "paper", "ours")}
UNDISCLOSED = "undisclosed"

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seeds = Annotated[list[int], Field(min_length=2, max_length=2)]  # [first, one past the last]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Rollout(Section):
    """How trajectories are sampled."""

    group_size: Annotated[int, Field(ge=2)] = 4  # G attempts at one task
    groups_per_update: Count = 4
    max_steps: Count = 15
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Count = 1024
    max_context_tokens: Count = 16384  # prompt and response; a longer prompt ends the episode with context_overflow
    max_format_errors: Count = 3  # responses in a row without an action that end the episode with format_error


class Train(Section):
    """The optimiser and its schedule."""

    learning_rate: Rate = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: BelowOne = 0.0
    updates: Count = 100
    num_iterations: Count = 1  # optimizer steps over one batch of rollouts
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    weight_decay: NonNegative = 0.0
    max_grad_norm: Rate = 1.0
    max_rows_per_forward: Count = 8  # bounds memory; the loss does not depend on it
    seed: Annotated[int, Field(ge=0)] = 0
    eval_every: Annotated[int, Field(ge=0)] = 0  # updates between evaluations on held-out seeds; 0: first and last only
    eval_episodes: Count = 4  # per task
    save_every: Annotated[int, Field(ge=0)] = 0  # updates between checkpoints; 0: at the end only


class Tasks(Section):
    """What is played."""

    names: Annotated[list[str], Field(min_length=1)]
    train_seeds: Seeds = [0, 100_000]
    held_out_seeds: Seeds = [1_000_000, 1_001_000]

    @model_validator(mode="after")
    def seeds_apart(self) -> Tasks:
        for name, (first, end) in (("train_seeds", self.train_seeds), ("held_out_seeds", self.held_out_seeds)):
            if not 0 <= first < end:
                raise ValueError(f"tasks.{name} = {[first, end]} is not allowed: [first, end] with 0 <= first < end")
        if self.train_seeds[0] < self.held_out_seeds[1] and self.held_out_seeds[0] < self.train_seeds[1]:
            raise ValueError(
                f"tasks.held_out_seeds = {self.held_out_seeds} is not allowed: it overlaps"
                f" tasks.train_seeds = {self.train_seeds}"
            )
        return self


class Lora(Section):
    r: Count = 16
    alpha: Rate = 32.0
    dropout: BelowOne = 0.0
    target_modules: str = "all-linear"


class WarmUp(Section):
    """Imitation of demonstrations before the method's own training."""

    demonstrations: Count = 512  # episodes
    steps: Count = 200
    learning_rate: Rate = 1e-3
    batch_size: Count = 32  # rows


class Tiny(Section):
    """Shape of the embedded policy, `policy.model: tiny`."""

    layers: Count = 2
    width: Count = 128
    heads: Count = 4


class Policy(Section):
    model: str | None = None  # "tiny", or the path or hub name of a model; a recipe without a profile leaves it to you
    lora: Lora | None = None
    warm_up: WarmUp | None = None
    tiny: Tiny = Tiny()


class Browser(Section):
    """The pool of real pages. Times in seconds."""

    pages: Count = 4
    viewport: Annotated[list[int], Field(min_length=2, max_length=2)] = [1280, 720]
    navigation_timeout: Rate = 15.0
    action_timeout: Rate = 5.0
    episode_timeout: Rate = 120.0

    @field_validator("viewport")
    @classmethod
    def visible(cls, value: list[int]) -> list[int]:
        if min(value) < 1:
            raise ValueError(f"browser.viewport = {value} is not allowed: [width, height], both >= 1")
        return value


class Recipe(Section):
    """A recipe with one value per setting: what a run uses, and writes into its folder with `resolved()`."""

    type: str
    preset: Literal["paper", "released"]
    profile: str | None
    objective: dict[str, Any]
    rollout: Rollout
    train: Train
    tasks: Tasks
    policy: Policy
    browser: Browser
    provenance: dict[str, str]  # "train.learning_rate" -> "paper", "released", "ours", "default" or "override"

    def load_objective(self) -> Any:
        """The recipe's `webagent_core.objectives.Objective`."""
        from webagent_core.objectives import load_objective

        return load_objective(self.type, self.preset, **self.objective)

    def resolved(self) -> dict[str, Any]:
        """Plain data: every setting of every section as {"value": ..., "from": ...}."""
        plain: dict[str, Any] = {"type": self.type, "preset": self.preset, "profile": self.profile}
        sections = {name: getattr(self, name) for name in SECTIONS}
        sections["objective"] = self.load_objective().model_dump()
        for name, section in sections.items():
            values = section if isinstance(section, dict) else section.model_dump()
            plain[name] = {}
            for path, value in leaves(values):
                source = self.provenance.get(".".join((name, *path)), "default")
                nested = plain[name]
                for part in path[:-1]:
                    nested = nested.setdefault(part, {})
                nested[path[-1]] = {"value": value, "from": source}
        return plain


SECTIONS = ("objective", "rollout", "train", "tasks", "policy", "browser")


def load_recipe(
    name: str | Path,
    preset: str = "paper",
    profile: str | None = "embedded",
    overrides: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe `name` (a shipped one, or a path to a YAML file or to a directory with recipe.yaml), checked.

    `overrides` go last, with dotted names: {"rollout.group_size": 8}. `profile` None takes the recipe's own numbers.
    Raises ValueError, in one line that names the setting, its value and what is allowed, for anything unknown, out of
    range or impossible together.
    """
    path = find_recipe(name)
    content = read_yaml(path)
    kind = content.get("type")
    shipped = shipped_recipes()
    if kind not in shipped:
        raise ValueError(f"{path}: type = {kind!r} is not known; there are {', '.join(shipped)}")
    layers = [content] if shipped[kind] == path else [read_yaml(shipped[kind]), content]
    if preset not in ORDER:
        raise ValueError(f"preset = {preset!r} is not known; there are {', '.join(ORDER)}")

    profiles = sorted({known for layer in layers for known in section(path, layer, "profiles")})
    if profile is not None and profile not in profiles:
        raise ValueError(f"profile = {profile!r} is not known to {kind}; there are {', '.join(profiles) or 'none'}")

    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}

    def put(setting: str, value: Any, source: str) -> None:
        # A later layer that sets or removes a whole sub-section (policy.lora: null) replaces what stands below it.
        for known in [k for k in values if k.startswith(setting + ".") or setting.startswith(k + ".")]:
            del values[known], provenance[known]
        values[setting], provenance[setting] = value, source

    for layer in layers:
        unknown = sorted(set(layer) - {"type", "paper", "profiles", *SECTIONS})
        if unknown:
            allowed = ", ".join(("type", "paper", "profiles", *SECTIONS))
            raise ValueError(f"{path}: unknown key {unknown[0]}; allowed: {allowed}")
        chosen = section(path, layer, "profiles").get(profile) or {}
        unknown = sorted(set(chosen) - set(SECTIONS))
        if unknown:
            raise ValueError(f"{path}: unknown key profiles.{profile}.{unknown[0]}; allowed: {', '.join(SECTIONS)}")
        for origin, sections in (("", layer), (f"profiles.{profile}.", chosen)):
            for part in SECTIONS:
                for setting, cell in cells(section(path, sections, part, origin), (part,)):
                    value, source = pick(path, origin + ".".join(setting), cell, preset)
                    put(".".join(setting), value, source)
    for setting, value in (overrides or {}).items():
        if setting.split(".")[0] not in SECTIONS or "." not in setting:
            raise ValueError(
                f"override {setting} = {value!r} is not allowed: section.setting, with section one of"
                f" {', '.join(SECTIONS)}"
            )
        put(setting, value, "override")

    nested: dict[str, Any] = {part: {} for part in SECTIONS}
    for setting, value in values.items():
        *parents, last = setting.split(".")
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value

    from webagent_core.objectives.hyperparameters import one_line

    try:
        recipe = Recipe(type=kind, preset=preset, profile=profile, provenance=provenance, **nested)
    except ValidationError as error:
        raise ValueError(one_line(kind, Recipe, error)) from None
    recipe.load_objective()
    return recipe


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes of this distribution and their files: the clone's recipes/, or the wheel's copy of it."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "recipes", here / "recipes"):
        if folder.is_dir():
            return {path.parent.name: path for path in sorted(folder.glob("*/recipe.yaml"))}
    raise FileNotFoundError(f"recipes: no folder beside or inside {here}; the installation is incomplete")


def find_recipe(name: str | Path) -> Path:
    shipped = shipped_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    path = Path(name)
    path = path / "recipe.yaml" if path.is_dir() else path
    if path.is_file():
        return path.resolve()
    raise ValueError(
        f"recipe = {str(name)!r} is not known; there are {', '.join(shipped)}, or a path to a recipe.yaml or its folder"
    )


class Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: 1e-6 is a number and not a text, as PyYAML's older rule has it."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a recipe is a mapping with a type, not {type(content).__name__}")
    return content


def section(path: Path, layer: Mapping[str, Any], name: str, origin: str = "") -> dict[str, Any]:
    value = layer.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {origin}{name} = {value!r} is not allowed: a section")
    return value


def cells(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting of a section with its cell: a plain value or a mapping of sources."""
    for name, value in values.items():
        if isinstance(value, dict) and not set(value) <= set(SOURCES):
            yield from cells(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def pick(path: Path, setting: str, cell: Any, preset: str) -> tuple[Any, str]:
    """The value of a cell under a preset, and its source. A plain value counts as ours."""
    if not isinstance(cell, dict):
        return cell, "ours"
    for source in ORDER[preset]:
        if source in cell and cell[source] != UNDISCLOSED:
            return cell[source], source
    raise ValueError(f"{path}: {setting} = {cell!r} is not allowed: at least one source must give a value")
