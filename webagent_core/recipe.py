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

from webagent_core.rewards.for_recipe import check_name
from webagent_core.rewards.judge_client import JudgeSettings

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
    top_k: Count | None = None  # null: all tokens
    max_response_tokens: Count = 1024
    max_context_tokens: Count = 16384  # prompt and response; a longer prompt ends the episode with context_overflow
    max_format_errors: Count = 3  # responses in a row without an action that end the episode with format_error

    @model_validator(mode="after")
    def room_for_a_prompt(self) -> Rollout:
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens = {self.max_response_tokens} is not allowed: less than"
                f" rollout.max_context_tokens = {self.max_context_tokens}, which holds prompt and response"
            )
        return self


class Train(Section):
    """The optimiser and its schedule."""

    learning_rate: Rate = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: BelowOne = 0.0  # of all updates
    warmup_updates: Annotated[int, Field(ge=0)] = 0  # or as a number
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

    @model_validator(mode="after")
    def one_warmup(self) -> Train:
        if self.warmup_ratio and self.warmup_updates:
            raise ValueError(
                f"train.warmup_updates = {self.warmup_updates} is not allowed: train.warmup_ratio = {self.warmup_ratio}"
                " is set too, and one of them must be 0"
            )
        return self


class Tasks(Section):
    """What is played."""

    names: Annotated[list[str], Field(min_length=1)]
    file: str | None = None  # one JSON object a line, a task each (tasks/written.py); a seed is then a line's number
    sites: dict[str, str] | None = None  # of WebArena's tasks (tasks/webarena.py): the address of each
    logins: str | None = None  # and the folder with their logins; null: nobody is logged in
    server: str | None = None  # address of an OpenEnv server (tasks/openenv.py), in place of the browser
    server_actions: Literal["browsergym", "pyautogui", "call"] = "browsergym"  # how it wants actions spelled
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
    mistakes: BelowOne = 0.0  # chance at each step that the demonstrator presses what stands last on the page
    rehearsal: BelowOne = 0.0  # share of rows that are made-up pages, lest a tiny policy unlearn to look names up
    steps: Count = 200
    learning_rate: Rate = 1e-3
    batch_size: Count = 32  # rows


class Policy(Section):
    # "tiny" (webagent_core.policy), or the folder or hub name of a model. Without a profile it is left to you.
    model: str | None = None
    system_prompt: bool = True  # explain the notation of pages and the actions; a tiny policy learns them in warm-up
    # What the numbers of a policy that acts at points of a screenshot mean (`CoordinateSpace`). Qwen3-VL: norm1000.
    coordinates: Literal["norm1000", "norm999", "norm1", "pixel", "resized_abs"] = "norm1000"
    # What the KL keeps close to: "tiny", or a folder or hub name, of the policy's own shape and vocabulary. null: the
    # policy as training starts.
    reference: str | None = None
    lora: Lora | None = None
    warm_up: WarmUp | None = None


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


class Reward(Section):
    """How a trajectory is scored; `webagent_core.rewards.for_recipe` builds it. Any recipe may take any manager."""

    manager: str = "page"  # a name of MANAGERS, or package.module:Class, a RewardManager of your own
    facts: str | None = None  # JSON file: what the manager has to know of each task (rubric, reference, evaluation)
    judge: JudgeSettings | None = None
    judge_screenshots: Count | None = None  # the last ones, shown to the judge; null: all
    judge_vision: bool = True  # false: the judge is shown the text of pages
    votes: Count | None = None  # verdicts asked for one trajectory; all must say success
    vote_temperature: NonNegative | None = None
    outcome_model: str | None = None  # folder of the model
    layers: bool | None = None  # OpenWebRL: -1 for format errors in a row, 0 without an answer, before the manager
    format_weight: NonNegative | None = None  # of -1 for a response without an action (`gold_step`: of 1 for an action)
    type_weight: NonNegative | None = None
    value_weight: NonNegative | None = None
    text_f1: Fraction | None = None  # from this token F1 on, a text value counts as right
    length_penalty: NonNegative | None = None  # at most this off a success, growing from ...
    length_free: Annotated[int, Field(ge=0)] | None = None  # ... so many steps (null: 0) ...
    length_limit: Count | None = None  # ... to so many (null: rollout.max_steps)

    @field_validator("manager")
    @classmethod
    def named(cls, value: str) -> str:
        check_name(value)
        return value


# From here to `Recipe`: sections that only some methods have. A recipe has those, and of those the settings, that the
# shipped file of its type has.


class Context(Section):
    """What of the past stays in the prompt."""

    observation: Literal["screenshot", "text"] | None = None  # text: the page's text wherever a picture would stand
    history_screenshots: Count | None = None  # pages that the prompt shows, the newest included
    max_pixels: Count | None = None  # per screenshot


class Sampling(Section):
    """Which trajectories and tasks make up the training data."""

    max_steps_by_difficulty: Annotated[list[int], Field(min_length=1)] | None = None
    later_max_steps: Count | None = None  # replaces rollout.max_steps ...
    later_from_update: Count | None = None  # ... from this update on
    rows_per_update: Count | None = None  # step rows drawn from what was played
    recency_power: NonNegative | None = None  # weight of an iteration, by its place among those kept
    recency_window: Count | None = None  # iterations kept
    max_staleness: Annotated[int, Field(ge=0)] | None = None  # policy versions between sampling and training
    candidate_tasks: Count | None = None  # single tasks (a name and a seed) to choose from; null: each name once
    task_trials: Count | None = None  # attempts at a task before training ...
    task_min_successes: Count | None = None  # ... of which so many must succeed
    replay_capacity: Count | None = None  # stored successes per task
    replay_min_probability: Fraction | None = None  # window of an action's mean token probability, 1/perplexity
    replay_max_probability: Fraction | None = None
    replay_ratio: NonNegative | None = None  # replayed data, at most so many times the new
    updates_per_phase: Count | None = None  # after each phase: another reference, another buffer, new tasks
    new_tasks_per_phase: Count | None = None
    new_task_min_value: Fraction | None = None  # window of the critic's value in which a new task is kept
    new_task_max_value: Fraction | None = None
    generated_tasks: Count | None = None  # new tasks that come before all others ...
    generated_epochs: Count | None = None  # ... so many times each
    generator: JudgeSettings | None = None  # model that words new tasks; null: variations of MiniWoB++ pages
    site: str | None = None  # what it is told of where the agent works
    recorded_steps: str | None = None  # folder of a recording (tasks/recorded_steps.py); null: made of demonstrations
    training_steps: Count | None = None  # single steps drawn from a data set
    history_steepness: NonNegative | None = None  # how much a drawn history's length leans to the whole; null: no draw
    history_ramp: Rate | None = None  # that lean is complete after 1/ramp of all updates


class Critic(Section):
    """Training of the value network. All but the learning rate is read on TRL alone."""

    learning_rate: Rate | None = None
    passes: Count | None = None  # over the rows of a batch; null: train.num_iterations
    pretrain_passes: Count | None = None  # while the policy stands still; null: passes
    rows_per_step: Count | None = None  # rows in one optimizer step; null: all of the batch
    min_gain: Fraction | None = None  # in explained variance, below which value pre-training ends; null: never early


class Search(Section):
    """Tree search for pairs."""

    proposals: Annotated[int, Field(ge=2)] | None = None  # K actions proposed at a node
    exploration: NonNegative | None = None  # c_exp of UCB1
    mix: Fraction | None = None  # alpha: Q = alpha * measured success + (1 - alpha) * the model's own ranking
    threshold: NonNegative | None = None  # difference in Q from which two actions make a pair
    iterations: Count | None = None
    depth: Count | None = None
    most_actions: Count | None = None  # acted out in one search, restoring included
    ranking: Literal["asked", "likelihood"] | None = None  # ask the policy which is best, or take its likeliest


class Pairs(Section):
    """Preference pairs: rounds of gathering them with the policy as it is and of training on them."""

    rounds: Count | None = None  # the updates are spread over them evenly
    per_update: Count | None = None  # pairs in one update
    file: str | None = None  # a pairs.jsonl to train on instead of gathering
    corrector: JudgeSettings | None = None  # model that corrects failed attempts; null: the scripted demonstrator
    imitation_steps: Count | None = None  # before a round's updates, on what succeeded and on corrections; null: none
    imitation_learning_rate: Rate | None = None  # null: train.learning_rate


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
    reward: Reward
    context: Context | None = None
    sampling: Sampling | None = None
    critic: Critic | None = None
    search: Search | None = None
    pairs: Pairs | None = None
    provenance: dict[str, str]  # "train.learning_rate" -> "paper", "released", "ours" or "override"; defaults are ours

    def load_objective(self) -> Any:
        """The recipe's `webagent_core.objectives.Objective`."""
        from webagent_core.objectives import load_objective

        return load_objective(self.type, self.preset, **self.objective)

    def resolved(self) -> dict[str, Any]:
        """Plain data: every setting of every section as {"value": ..., "from": ...}."""
        plain: dict[str, Any] = {"type": self.type, "preset": self.preset, "profile": self.profile}
        sections = {name: getattr(self, name) for name in SECTIONS if getattr(self, name) is not None}
        sections["objective"] = self.load_objective().model_dump()
        for name, section in sections.items():
            sparse = name in OPTIONAL or name == "reward"
            values = section if isinstance(section, dict) else section.model_dump(exclude_none=sparse)
            plain[name] = {}
            for path, value in leaves(values):
                source = self.provenance.get(".".join((name, *path)), "ours")
                nested = plain[name]
                for part in path[:-1]:
                    nested = nested.setdefault(part, {})
                nested[path[-1]] = {"value": value, "from": source}
        return plain


OPTIONAL = ("context", "sampling", "critic", "search", "pairs")
SECTIONS = ("objective", "rollout", "train", "tasks", "policy", "browser", "reward", *OPTIONAL)


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
    layers = layers_of(path)
    kind = layers[0]["type"]
    if preset not in ORDER:
        raise ValueError(f"preset = {preset!r} is not known; there are {', '.join(ORDER)}")
    profiles = sorted({name for layer in layers for name in section(path, layer, "profiles")})
    if profile is not None and profile not in profiles:
        raise ValueError(f"profile = {profile!r} is not known to {kind}; there are {', '.join(profiles) or 'none'}")

    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}

    def put(setting: str, value: Any, source: str) -> None:
        # A later layer that sets or removes a whole sub-section (policy.lora: null) replaces what stands below it.
        for other in [k for k in values if k.startswith(setting + ".") or setting.startswith(k + ".")]:
            del values[other], provenance[other]
        values[setting], provenance[setting] = value, source

    for setting, origin, cell in settings(path, layers, profile):
        refuse_unknown(layers[0], path, origin, setting)
        put(setting, *pick(path, origin + setting, cell, preset))
    for setting, value in (overrides or {}).items():
        refuse_unknown(layers[0], "override", "", setting)
        put(setting, value, "override")

    nested: dict[str, Any] = {part: {} for part in SECTIONS if part not in OPTIONAL}
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
    check_reference(recipe)
    return recipe


def check_reference(recipe: Recipe) -> None:
    """Raise ValueError if `policy.reference` is set where nothing would read it, or where something would undo it."""
    objective = recipe.load_objective()
    if recipe.policy.reference is None:
        return
    if not objective.uses_reference:
        reason = f"the loss of {recipe.type} with these settings has no reference"
    elif recipe.pairs is not None:
        reason = "a pair is scored by the policy that its round starts from"
    elif recipe.policy.lora is not None:
        reason = "with policy.lora the reference is the model without its adapters"
    elif recipe.sampling is not None and recipe.sampling.updates_per_phase:
        reason = "with sampling.updates_per_phase each phase takes the policy of the moment"
    else:
        return
    raise ValueError(f"policy.reference = {recipe.policy.reference!r} is not allowed: must be null, as {reason}")


def layers_of(path: Path) -> list[dict[str, Any]]:
    """The file's content, on top of the shipped recipe of its type unless it is that."""
    content = read_yaml(path)
    shipped = shipped_recipes()
    kind = content.get("type")
    if not isinstance(kind, str) or kind not in shipped:
        raise ValueError(f"{path}: type = {kind!r} is not known; there are {', '.join(shipped)}")
    return [content] if shipped[kind] == path else [read_yaml(shipped[kind]), content]


def settings(path: Path, layers: list[dict[str, Any]], profile: str | None) -> Iterator[tuple[str, str, Any]]:
    """Every (setting, where in the file, cell), lowest layer first, a layer's profile above the layer itself.

    What a profile has in common for all recipes stands in recipes/profiles, below each recipe's own part of it.
    """
    for number, layer in enumerate(layers):
        own = {key: value for key, value in layer.items() if key not in ("type", "paper", "profiles")}
        chosen = section(path, section(path, layer, "profiles"), profile, "profiles.") if profile else {}
        common = shared_profile(profile) if profile and number == 0 else {}
        within = f"profiles.{profile}."
        for origin, block in (("", own), (within, common), (within, chosen)):
            for part in block:
                if part not in SECTIONS:
                    yield part, origin, None
                for setting, cell in cells(section(path, block, part, origin), (part,)):
                    yield ".".join(setting), origin, cell


def refuse_unknown(shipped: Mapping[str, Any], where: Path | str, origin: str, setting: str) -> None:
    """Optional sections, and settings of them, are those of the shipped recipe: no code of the method reads others."""
    part, _, rest = setting.partition(".")
    optional = {
        name: sorted({key for layer in (shipped, *shipped.get("profiles", {}).values()) for key in layer.get(name, {})})
        for name in OPTIONAL
        if name in shipped
    }
    allowed = [name for name in SECTIONS if name not in OPTIONAL or name in optional]
    if part not in allowed or not rest:
        raise ValueError(
            f"{where}: unknown key {origin}{setting}; allowed: section.setting, section one of {', '.join(allowed)}"
        )
    if part in optional and rest.partition(".")[0] not in optional[part]:
        raise ValueError(f"{where}: unknown key {origin}{setting}; allowed: {', '.join(optional[part])}")


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes of this distribution and their files. recipes/ stands beside the package, as in a clone."""
    folder = Path(__file__).resolve().parents[1] / "recipes"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there; the installation is incomplete")
    return {path.parent.name: path for path in sorted(folder.glob("*/recipe.yaml"))}


def shared_profile(name: str) -> dict[str, Any]:
    """The part of a profile that all recipes share; empty where there is none."""
    path = Path(__file__).resolve().parents[1] / "recipes" / "profiles" / f"{name}.yaml"
    return read_yaml(path) if path.is_file() else {}


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
