"""Recipes: values, where they come from, and one-line refusals."""

from __future__ import annotations

import pytest

from webagent_core.objectives import OBJECTIVES, load_objective
from webagent_core.recipe import SOURCES, load_recipe, read_yaml, settings, shipped_recipes


def test_the_paper_preset_takes_the_papers_numbers_and_the_released_one_the_codes():
    paper = load_recipe("webagent_r1", preset="paper", profile=None)
    released = load_recipe("webagent_r1", preset="released", profile=None)
    assert (paper.objective["adv_eps"], released.objective["adv_eps"]) == (0.0, 1e-4)
    assert paper.load_objective().normaliser == "groups"
    assert released.load_objective().normaliser == "sequences"
    assert paper.provenance["rollout.group_size"] == "released"  # undisclosed in the paper


def test_a_profile_and_overrides_replace_values_and_say_so():
    recipe = load_recipe("webagent_r1", overrides={"rollout.group_size": 2, "policy.lora.r": 4})
    assert (recipe.rollout.group_size, recipe.provenance["rollout.group_size"]) == (2, "override")
    assert recipe.policy.lora.r == 4
    assert (recipe.policy.model, recipe.provenance["policy.model"]) == ("tiny", "ours")
    resolved = recipe.resolved()
    assert resolved["train"]["learning_rate"]["from"] == "ours"
    assert resolved["objective"]["beta"] == {"value": 0.001, "from": "paper"}
    assert resolved["policy"]["warm_up"]["steps"]["from"] == "ours"
    assert resolved["browser"]["pages"] == {"value": recipe.browser.pages, "from": "ours"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"overrides": {"rollout.group_size": 1}}, "rollout.group_size = 1 is not allowed: a whole number >= 2"),
        ({"overrides": {"rollout.max_steps": 0}}, "rollout.max_steps = 0 is not allowed: a whole number >= 1"),
        ({"overrides": {"train.learning_rate": 0.0}}, "train.learning_rate = 0.0 is not allowed: a number > 0"),
        ({"overrides": {"train.lr_schedule": "warm"}}, "one of constant, linear, cosine"),
        ({"overrides": {"rollout.groups": 3}}, "unknown key rollout.groups; allowed: group_size"),
        ({"overrides": {"policy.lora.rank": 3}}, "unknown key policy.lora.rank; allowed: r, alpha"),
        ({"overrides": {"policy.lora.r": 0}}, "policy.lora.r = 0 is not allowed: a whole number >= 1"),
        ({"overrides": {"group_size": 3}}, "override: unknown key group_size; allowed: section.setting"),
        ({"overrides": {"critic.learning_rate": 1e-3}}, "override: unknown key critic.learning_rate; allowed: section"),
        ({"overrides": {"train.warmup_ratio": 0.1, "train.warmup_updates": 3}}, "train.warmup_updates = 3 is not"),
        ({"overrides": {"objective.eps_low": 1.0}}, "eps_low = 1.0 is not allowed: a number >= 0 and < 1"),
        ({"overrides": {"objective.gamma": 1.0}}, "unknown key gamma"),
        ({"overrides": {"tasks.names": []}}, "tasks.names = [] is not allowed: a list of 1 or more"),
        ({"overrides": {"tasks.held_out_seeds": [5, 9]}}, "overlaps tasks.train_seeds"),
        ({"overrides": {"tasks.train_seeds": [9, 9]}}, "tasks.train_seeds = [9, 9] is not allowed"),
        ({"overrides": {"tasks.train_seeds": [9]}}, "tasks.train_seeds = [9] is not allowed: a list of 2"),
        ({"overrides": {"rollout.max_response_tokens": 99999}}, "max_response_tokens = 99999 is not allowed: less"),
        ({"overrides": {"browser.viewport": [0, 9]}}, "browser.viewport = [0, 9] is not allowed"),
        ({"preset": "papers"}, "preset = 'papers' is not known; there are paper, released"),
        ({"profile": "laptop"}, "profile = 'laptop' is not known to webagent_r1; there are cluster, embedded, smollm2"),
    ],
)
def test_bad_settings_are_refused_in_one_line(kwargs, message):
    with pytest.raises(ValueError) as caught:
        load_recipe("webagent_r1", **kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "also", "reason"),
    [
        ("arpo", {}, "the loss of arpo with these settings has no reference"),
        ("webagent_r1", {"objective.beta": 0.0}, "the loss of webagent_r1 with these settings has no reference"),
        ("webagent_r1", {"policy.lora.r": 4}, "with policy.lora the reference is the model without its adapters"),
        ("webrl", {"sampling.updates_per_phase": 3}, "with sampling.updates_per_phase each phase takes the policy of"),
        ("uitars", {}, "a pair is scored by the policy that its round starts from"),
        ("agentq", {}, "a pair is scored by the policy that its round starts from"),
    ],
)
def test_another_reference_is_refused_where_nothing_would_read_it(name, also, reason):
    with pytest.raises(ValueError) as caught:
        load_recipe(name, overrides={"policy.reference": "tiny"} | also)
    assert str(caught.value).startswith("policy.reference = 'tiny' is not allowed: must be null, as " + reason)
    assert "\n" not in str(caught.value)
    assert load_recipe("zerogui", overrides={"policy.reference": "tiny"}).policy.reference == "tiny"


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"recipe = 'webagent-r1' is not known; there are .*webagent_r1"):
        load_recipe("webagent-r1")


def test_a_file_of_ones_own_changes_only_what_it_says(tmp_path):
    own = tmp_path / "recipe.yaml"
    own.write_text("type: webagent_r1\nrollout:\n  group_size: 3\ntrain:\n  learning_rate: 1e-5\n")
    recipe, shipped = load_recipe(tmp_path), load_recipe("webagent_r1")
    assert (recipe.rollout.group_size, recipe.train.learning_rate) == (3, 1e-5)
    assert recipe.objective == shipped.objective
    assert recipe.tasks == shipped.tasks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: webagent_r2\n", "type = 'webagent_r2' is not known; there are"),
        ("type: [webagent_r1]\n", "type = ['webagent_r1'] is not known"),
        ("rollout: {}\n", "type = None is not known; there are"),
        ("type: webagent_r1\nrolout: {}\n", "unknown key rolout; allowed: section.setting"),
        ("type: webagent_r1\nrollout: 3\n", "rollout = 3 is not allowed: a section"),
        ("type: webagent_r1\nrollout: {max_steps: {paper: undisclosed}}\n", "at least one source must give a value"),
        ("type: webagent_r1\nprofiles: {embedded: {rolout: {}}}\n", "unknown key profiles.embedded.rolout"),
        ("- 1\n", "a recipe is a mapping"),
        ("type: [\n", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_number_names_its_source(name):
    path = shipped_recipes()[name]
    content = read_yaml(path)
    for profile in (None, *content.get("profiles", {})):
        for setting, _, cell in settings(path, [content], profile):
            if not isinstance(cell, str | list):
                assert isinstance(cell, dict) and set(cell) <= set(SOURCES) and cell, setting


@pytest.mark.parametrize("name", shipped_recipes())
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_a_recipe_file_and_its_objectives_defaults_say_the_same(name, preset):
    if preset == "released" and OBJECTIVES[name].released is None:
        with pytest.raises(ValueError, match=rf"preset = 'released' does not exist for {name}"):
            load_recipe(name, preset=preset, profile=None)
        return
    recipe = load_recipe(name, preset=preset, profile=None)
    expected = load_objective(name, preset)
    if name == "hiconagent":  # the recipe asks for the compressed branch; the objective alone takes what rows have
        expected = expected.model_copy(update={"hcpo": True})
    assert recipe.load_objective() == expected
    numbers = {k: v for k, v in expected.model_dump().items() if isinstance(v, float) and not isinstance(v, bool)}
    for setting in numbers:
        assert f"objective.{setting}" in recipe.provenance or setting in IDLE.get(name, ()), setting


# Numbers of an objective that a recipe leaves alone, because another setting of it makes them idle.
IDLE = {
    "webagent_r1": ("k",),
    "openwebrl": ("k", "beta"),
    "asyncwebrl": ("beta",),
    "arpo": ("beta",),
    "uitars2": ("beta",),
}


def test_there_is_a_recipe_for_every_objective():
    assert set(shipped_recipes()) == set(OBJECTIVES)
