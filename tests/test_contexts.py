"""What each paper's policy is shown, what is cut when it does not fit, and page text that wants to be more."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from webagent_core.episode.actions import Action
from webagent_core.episode.contexts import (
    CONTEXTS,
    SCREENSHOT_PROMPT,
    SYSTEM_PROMPT,
    AgentQContext,
    ARPOContext,
    AsyncWebRLContext,
    Budget,
    ContextManager,
    ContextOverflow,
    Fit,
    HiconAgentContext,
    OpenWebRLContext,
    PlaceholderContext,
    ScreenshotContext,
    UITars2Context,
    UITarsContext,
    WebGymContext,
    WebRLContext,
    chat_counter,
    context_for,
    goal_of,
)
from webagent_core.episode.pictures import picture_part, pictures_of, shown_size
from webagent_core.episode.trajectory import Step
from webagent_core.policy.tokenizer import build_tokenizer
from webagent_core.recipe import load_recipe, shipped_recipes

CASES = json.loads((Path(__file__).parent / "cases" / "context.json").read_text(encoding="ascii"))
EVERY = pytest.mark.parametrize("name", sorted(CONTEXTS))


def case(number: int) -> tuple[dict, dict]:
    found = next(each for each in CASES if each["id"] == f"ctx-s-{number:03d}")
    return found["input"], found["expected"]


@cache
def jpeg(number: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """A picture that can be told from the others by its colour."""
    data = io.BytesIO()
    Image.new("RGB", size, (number * 8 % 256, 90, 20)).save(data, "JPEG")
    return data.getvalue()


def step(number: int, page: str = "", response: str | None = None, error: str | None = None) -> Step:
    if response is None:
        response = f"Thought: t{number}.\nMemory: m{number}\nAction: click(start_box='({number},{number})')"
    action = Action("click", x=number, y=number)
    return Step("", page or f"page {number}", [], response, action, error, screenshot=jpeg(number))


def shown(chat: list[dict]) -> list:
    """The chat as (role, texts and numbers of pictures)."""
    out = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list):
            content = [part["text"] if part["type"] == "text" else numbers()[part["image"]] for part in content]
        out.append((message["role"], content))
    return out


@cache
def numbers() -> dict[str, int]:
    return {picture_part(jpeg(number))["image"]: number for number in range(1, 32)}


def pictures(chat: list[dict]) -> list[int]:
    return [
        part for _, content in shown(chat) if isinstance(content, list) for part in content if isinstance(part, int)
    ]


def text_of(chat: list[dict]) -> str:
    return json.dumps([content for _, content in shown(chat)])


THREE = [step(1), step(2), step(3)]


# --- Each paper's rule ---


def test_placeholder_case_of_the_corpus():
    given_input, expected = case(2)
    pages, actions = given_input["observations"], given_input["actions"]
    steps = [Step("", page, [], response=action) for page, action in zip(pages, actions, strict=False)]
    chat = PlaceholderContext().messages("Buy tea", steps, pages[-1])
    contents = [message["content"] for message in chat]
    assert contents[0] == f"Task: Buy tea\n{expected['messages'][0]}" and contents[1:] == expected["messages"][1:]


def test_last_images_case_of_the_corpus():
    given_input, expected = case(1)
    steps = [step(number) for number in range(1, given_input["steps"] + 1)]
    chat = UITarsContext(history_screenshots=given_input["n"]).messages("Buy tea", steps, "", jpeg(6))
    assert pictures(chat) == expected["images_from_steps"]
    assert [f"t{n}." in text_of(chat) for n in expected["text_from_steps"][:-1]] == [True] * 5


def test_webgym_shows_one_screenshot_and_the_memory_written_last():
    chat = shown(WebGymContext().messages("Buy tea", THREE, "", jpeg(4)))
    assert chat == [("user", ["Task: Buy tea\nMemory: m3", 4])]
    silent = [*THREE, step(4, response="Action: wait()")]
    assert shown(WebGymContext().messages("Buy tea", silent, "", jpeg(5)))[0][1][0] == "Task: Buy tea\nMemory: m3"
    assert shown(WebGymContext().messages("Buy tea", [], "", jpeg(1))) == [("user", ["Task: Buy tea", 1])]
    assert pictures(WebGymContext(history_screenshots=4).messages("Buy tea", [*THREE, step(4)], "", jpeg(5))) == [
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("response", "memory"),
    [
        ("Memory: a\nb\nAction: wait()", "a\nb"),
        ("**Memory:** a\n<action>wait()</action>", "a"),
        ("Memory: old\nThought: no.\nmemory\uff1a new", "new"),
        ("I have a bad Memory: x\nAction: wait()", ""),
    ],
)
def test_memory_is_the_last_line_of_that_name_up_to_the_action(response, memory):
    chat = shown(WebGymContext().messages("g", [step(1, response=response)], "", jpeg(2)))
    assert chat[0][1][0] == (f"Task: g\nMemory: {memory}" if memory else "Task: g")


def test_asyncwebrl_shows_its_own_last_response_and_the_last_screenshot():
    chat = shown(AsyncWebRLContext().messages("Buy tea", THREE, "", jpeg(4)))
    assert chat == [("user", ["Task: Buy tea"]), ("assistant", THREE[2].response), ("user", [4])]
    assert shown(AsyncWebRLContext().messages("Buy tea", [], "", jpeg(1))) == [("user", ["Task: Buy tea", 1])]


def test_openwebrl_shows_all_thoughts_one_screenshot_and_a_line_of_feedback():
    steps = [step(1), step(2), step(3, page="Search 3 <input text>\nMenu")]
    now = 'Search 3 <input text> = "tea"\nMenu'
    ((role, content),) = shown(OpenWebRLContext().messages("Buy tea", steps, now, jpeg(4)))
    thoughts = [f"{n}. t{n}.\nMemory: m{n}" for n in (1, 2, 3)]
    feedback = 'Feedback: the page changed; new on it: Search 3 <input text> = "tea"'
    assert content == ["\n".join(["Task: Buy tea", "Thoughts so far:", *thoughts, feedback]), 4]


@pytest.mark.parametrize(
    ("error", "now", "told"),
    [
        (None, "a\nb", "the page did not change"),
        (None, "a", "the page changed; some of it is gone"),
        ("no action\nfound", "a\nb", "no action found"),
        (None, "x" * 1000 + "\nb", "the page changed; new on it: xxx"),
    ],
)
def test_feedback_is_one_short_line(error, now, told):
    chat = shown(OpenWebRLContext().messages("g", [step(1, page="a\nb", error=error)], now, jpeg(2)))
    last = chat[0][1][0].splitlines()[-1]
    assert last.startswith(f"Feedback: {told}") and len(last) < 220


def test_arpo_keeps_everything_and_each_chat_begins_with_the_one_before():
    context, before, steps = ARPOContext(system="s"), [], []
    for number in range(1, 16):
        chat = context.messages("Buy tea", steps, "", jpeg(number))
        assert pictures(chat) == list(range(1, number + 1)) and chat[: len(before)] == before
        steps.append(step(number))
        before = [*chat, {"role": "assistant", "content": steps[-1].response}]
    with pytest.raises(ContextOverflow, match="step 16 would show more than 15 screenshots"):
        context.messages("Buy tea", steps, "", jpeg(16))


def test_uitars_keeps_all_words_and_the_last_five_screenshots():
    steps = [step(number) for number in range(1, 9)]
    chat = shown(UITarsContext().messages("Buy tea", steps, "", jpeg(9)))
    assert [role for role, _ in chat] == ["user", "assistant"] * 8 + ["user"]
    assert chat[0][1] == ["Task: Buy tea\nScreenshot left out"] and chat[2][1] == ["Screenshot left out"]
    assert [content for role, content in chat if role == "assistant"] == [each.response for each in steps]
    assert pictures(UITarsContext().messages("Buy tea", steps, "", jpeg(9))) == [5, 6, 7, 8, 9]
    assert CONTEXTS["zerogui"]().messages("g", steps, "", jpeg(9)) == UITarsContext().messages("g", steps, "", jpeg(9))


def test_uitars2_keeps_the_last_steps_in_full_and_sums_up_the_others():
    steps = [step(number) for number in range(1, 6)]
    chat = shown(UITars2Context(history_screenshots=3).messages("Buy tea", steps, "", jpeg(6)))
    summary = "\n".join(f"- t{n}. -> click(x={n}, y={n})" for n in (1, 2, 3))
    assert chat[0] == ("user", [f"Task: Buy tea\nEarlier:\n{summary}", 4])
    assert chat[1:] == [
        ("assistant", steps[3].response),
        ("user", [5]),
        ("assistant", steps[4].response),
        ("user", [6]),
    ]
    own = UITars2Context(history_screenshots=1, summarise=lambda steps: f"{len(steps)} done")
    assert shown(own.messages("Buy tea", steps, "", jpeg(6))) == [("user", ["Task: Buy tea\nEarlier:\n5 done", 6])]


def test_webrl_shows_the_page_and_the_actions_that_were_done():
    steps = [step(1), Step("", "", [], "I do not know.", error="no action")]
    (message,) = WebRLContext().messages("Buy tea", steps, "Tea 7 <button>")
    assert message["content"].splitlines() == [
        "Task: Buy tea", "Actions so far:", "1. click(x=1, y=1)", "2. no action", "Page:", "Tea 7 <button>",
    ]  # fmt: skip
    (message,) = WebRLContext().messages("Buy tea", [], "Tea 7 <button>")
    assert message["content"] == "Task: Buy tea\nPage:\nTea 7 <button>"


def test_agentq_shows_the_policys_own_actions_and_the_current_page():
    chat = AgentQContext().messages("Buy tea", THREE, "Tea 7 <button>")
    assert [message["role"] for message in chat] == ["user", "assistant"] * 3 + ["user"]
    assert [message["content"] for message in chat[1::2]] == [each.response for each in THREE]
    assert chat[0]["content"] == "Task: Buy tea" and chat[-1]["content"] == "Page:\nTea 7 <button>"
    assert not any("page 1" in message["content"] for message in chat)


def test_hiconagent_shows_a_history_with_pictures_or_without():
    ((_, full),) = shown(HiconAgentContext().messages("Buy tea", THREE[:2], "", jpeg(3)))
    assert full == ["Task: Buy tea", 1, "1. click(x=1, y=1)", 2, "2. click(x=2, y=2)", 3]
    ((_, compressed),) = shown(HiconAgentContext(history="compressed").messages("Buy tea", THREE[:2], "", jpeg(3)))
    assert compressed == ["Task: Buy tea", "1. click(x=1, y=1)", "2. click(x=2, y=2)", 3]
    with pytest.raises(ValueError, match="history = 'short' is not allowed: one of full, compressed"):
        HiconAgentContext(history="short")


# --- The same rules for a policy that reads: text wherever a picture would stand ---

VISUAL = sorted(name for name in CONTEXTS if issubclass(CONTEXTS[name], ScreenshotContext))
OLD = "Simplified HTML"


def read(number: int, error: str | None = None) -> Step:
    """A step on elements; its page is told from the others by its number."""
    response = f"I want tea{number}.\nMemory: m{number}\nAction: click({number})"
    return Step("", f"Tea{number} {number} <button>", [], response, Action("click", element=str(number)), error)


def said(name: str, steps: list[Step], page: str = "now", **settings) -> list[str]:
    return [message["content"] for message in CONTEXTS[name](observation="text", **settings).messages("g", steps, page)]


FIVE = [read(number) for number in range(1, 6)]
RESPONSES = [each.response for each in FIVE]
PAGES = [each.observation for each in FIVE]
THOUGHTS = [f"{n}. I want tea{n}.\nMemory: m{n}" for n in range(1, 6)]
SUMMARY = [f"- I want tea{n}. -> click({n})" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("name", "settings", "chat"),
    [
        ("webgym", {}, ["Task: g\nMemory: m5\nnow"]),
        (
            "webgym",
            {"history_screenshots": 3},
            [f"Task: g\nMemory: m5\n{PAGES[3]}", RESPONSES[3], PAGES[4], RESPONSES[4], "now"],
        ),
        ("asyncwebrl", {}, ["Task: g", RESPONSES[4], "now"]),
        (
            "openwebrl",
            {},
            ["\n".join(["Task: g", "Thoughts so far:", *THOUGHTS, "Feedback: the page changed; new on it: now\nnow"])],
        ),
        (
            "arpo",
            {},
            [f"Task: g\n{PAGES[0]}", *[x for pair in zip(RESPONSES, [*PAGES[1:], "now"], strict=True) for x in pair]],
        ),
        (
            "uitars",
            {"history_screenshots": 2},
            [f"Task: g\n{OLD}", RESPONSES[0], OLD, RESPONSES[1], OLD, RESPONSES[2], OLD, RESPONSES[3], PAGES[4],
             RESPONSES[4], "now"],
        ),  # fmt: skip
        (
            "uitars2",
            {"history_screenshots": 2},
            ["\n".join(["Task: g", "Earlier:", *SUMMARY[:4], PAGES[4]]), RESPONSES[4], "now"],
        ),
        (
            "hiconagent",
            {},
            ["\n".join(["Task: g", *[f"{page}\n{n}. click({n})" for n, page in enumerate(PAGES, 1)], "now"])],
        ),
        (
            "hiconagent",
            {"history": "compressed"},
            ["\n".join(["Task: g", *[f"{n}. click({n})" for n in range(1, 6)], "now"])],
        ),
    ],
)
def test_a_page_as_text_stands_where_the_paper_shows_its_picture(name, settings, chat):
    assert said(name, FIVE, **settings) == chat
    assert said(name, [], **settings) == ["Task: g\nnow"]


@pytest.mark.parametrize("name", VISUAL)
def test_pages_come_and_go_as_pictures_do(name):
    """The number of the page behind each picture, and the pages in the text, are the same at every step."""
    steps: list[Step] = []
    for number in range(1, 10):
        steps.append(replace(step(number), observation=f"(page {number})"))
        by_picture = CONTEXTS[name]().messages("g", steps, "(page 10)", jpeg(10))
        by_text = CONTEXTS[name](observation="text").messages("g", steps, "(page 10)", None)
        assert [message["role"] for message in by_picture] == [message["role"] for message in by_text]
        contents = "\n".join(message["content"] for message in by_text)
        pages = [int(found) for found in re.findall(r"^\(page (\d+)\)$", contents, re.M)]
        assert pages == pictures(by_picture) and pages[-1] == 10
        gone = [message["content"].count(OLD) for message in by_text]
        assert gone == [str(message["content"]).count("Screenshot left out") for message in by_picture]


@pytest.mark.parametrize("name", VISUAL)
def test_the_prompt_of_a_policy_that_reads_is_that_of_elements(name):
    context = CONTEXTS[name](observation="text")
    assert context.shows_page and context.prompt.startswith(SYSTEM_PROMPT) and "(x,y)" not in context.prompt
    assert context.prompt[len(SYSTEM_PROMPT) :] == CONTEXTS[name].prompt[len(SCREENSHOT_PROMPT) :]
    assert ("`Memory: ...`" in context.prompt) == (name in ("webgym", "asyncwebrl"))
    with pytest.raises(ValueError, match="observation = 'html' is not allowed: one of screenshot, text"):
        CONTEXTS[name](observation="html")


def test_thoughts_are_read_in_the_grammar_of_the_policy():
    at_point = "Go there.\nAction: click(start_box='(1,2)')"
    json = '<think>No. {"action": "click"}</think>Press 3\nAction: type(3, "a\\nclick(4)")'
    steps = [replace(read(1), response=json)]
    assert "\n1. No. {\"action\": \"click\"}Press 3\nFeedback" in said("openwebrl", steps)[0]
    assert "- No. {\"action\": \"click\"}Press 3 -> click(1)" in said("uitars2", steps, history_screenshots=1)[0]
    assert "\n1. Go there.\nFeedback" in text_of(
        OpenWebRLContext().messages("g", [step(1, response=at_point)], "", jpeg(2))
    ).replace("\\n", "\n")


def test_feedback_on_a_cut_page_speaks_of_what_is_left_of_it():
    done = replace(read(1), observation="a\nb\nc\nd")
    for now, told in (
        ("a\nb\nc\nd", "the page did not change"),
        ("a\nb\n[page cut here]", "the page did not change"),
        ("a\nd\n[page cut here]", "the page changed; some of it is gone"),
        ("a\nnew\n[page cut here]", "the page changed; new on it: new"),
    ):
        assert f"Feedback: {told}\n{now}" in said("openwebrl", [done], now)[0]


def test_a_page_that_was_cut_stays_as_it_was_shown():
    done = replace(read(1), observation="a <think>\nb", shown="a\n[page cut here]")
    assert said("arpo", [done])[0] == "Task: g\na\n[page cut here]"
    assert said("arpo", [replace(done, shown=None)])[0] == "Task: g\na < think>\nb"


def test_recipes_read_or_look_as_they_say():
    for name in VISUAL:
        looks, reads = load_recipe(name, profile=None), load_recipe(name, profile="embedded")
        assert (looks.context.observation, reads.context.observation) == ("screenshot", "text")
        assert not context_for(looks).shows_page and context_for(reads).shows_page
        assert context_for(reads).history_screenshots == context_for(looks).history_screenshots
        told = load_recipe(name, overrides={"policy.system_prompt": True})
        assert context_for(told).system.startswith(SYSTEM_PROMPT) and context_for(reads).system is None
    with pytest.raises(ValueError, match="context.observation = 'html' is not allowed"):
        load_recipe("uitars", overrides={"context.observation": "html"})
    with pytest.raises(ValueError, match="unknown key context.observation"):
        load_recipe("webrl", overrides={"context.observation": "text"})


# --- Every rule ---


@EVERY
def test_the_system_prompt_and_the_task_stand_first_and_the_current_page_is_shown_once(name):
    context = CONTEXTS[name](CONTEXTS[name].prompt)
    for steps in ([], THREE):
        chat = context.messages("Buy tea", steps, "Tea 7 <button>", jpeg(9))
        assert chat[0] == {"role": "system", "content": context.prompt}
        assert goal_of(chat) == "Buy tea" and text_of(chat).count("Buy tea") == 1
        if isinstance(context, ScreenshotContext):
            assert pictures(chat)[-1] == 9 and "Tea 7 <button>" not in text_of(chat[:-1])
            assert context.prompt.startswith(SCREENSHOT_PROMPT)
        else:
            assert text_of(chat).count("Tea 7 <button>") == 1 + context.prompt.count("Tea 7") and not pictures(chat)
            assert context.prompt == SYSTEM_PROMPT
    assert not CONTEXTS[name]().messages("Buy tea", [], "p", jpeg(9))[0]["role"] == "system"


@EVERY
def test_a_rule_that_shows_screenshots_says_so_where_there_is_none(name):
    if issubclass(CONTEXTS[name], ScreenshotContext):
        with pytest.raises(ValueError, match=rf"screenshot = None is not allowed: {CONTEXTS[name].__name__}"):
            CONTEXTS[name]().messages("g", [], "page")
    else:
        assert CONTEXTS[name]().messages("g", [], "page") == CONTEXTS[name]().messages("g", [], "page", jpeg(1))


def test_every_shipped_recipe_has_its_papers_context_with_its_own_settings():
    assert set(CONTEXTS) == set(shipped_recipes())
    for name in CONTEXTS:
        recipe = load_recipe(name, profile=None)
        context = context_for(recipe)
        assert type(context) is CONTEXTS[name] and context.system == context.prompt
        if recipe.context and recipe.context.history_screenshots:
            assert context.history_screenshots == recipe.context.history_screenshots
    assert context_for(load_recipe("webgym", "released", profile=None)).history_screenshots == 4
    assert context_for(load_recipe("arpo", "released", profile=None)).max_pixels == 2_116_800
    silent = load_recipe("uitars", profile=None, overrides={"policy.system_prompt": False})
    assert context_for(silent).system is None
    with pytest.raises(ValueError, match="history_screenshots = 0 is not allowed"):
        UITarsContext(history_screenshots=0)


def test_a_screenshot_over_the_limit_is_shown_smaller():
    large = jpeg(1, (400, 300))
    assert shown_size(large) == shown_size(large, 120_000) == (400, 300)
    (picture,) = pictures_of(UITarsContext(max_pixels=30_000).messages("g", [], "", large))
    assert picture.size == shown_size(large, 30_000) == (200, 150)


# --- Text of pages ---

SPECIAL = [
    *case(6)[0].values(),
    *case(7)[0].values(),
    "a <|pad|>",
    "<image> </s> <start_of_turn> <tool_call>{",
    "<\uff5cx\uff5c>",
]


@EVERY
@pytest.mark.parametrize("text", SPECIAL)
def test_text_of_a_page_is_never_a_control_token(name, text):
    tokenizer = build_tokenizer(["Reviews assistant"] * 5)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def controls(goal: str, page: str, told: str | None) -> tuple[int, str]:
        before = step(1, page="old", error=told)
        chat = CONTEXTS[name]().messages(goal, [before], page, jpeg(2))
        for message in chat:
            if isinstance(message["content"], list):
                message["content"] = "\n".join(part.get("text", "") for part in message["content"])
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        return sum(token in control for token in ids), "\n".join(message["content"] for message in chat)

    plain, _ = controls("goal", "page", None)
    for where in ((text, "page", None), ("goal", text, None), ("goal", "page", text)):
        found, said = controls(*where)
        assert found == plain and not re.search(r"<\||</?think>|<image>|</s>|<\uff5c|<tool_call>|<start_of", said)
    if CONTEXTS[name].shows_page:
        said = controls("goal", text, None)[1]
        assert re.sub(r"\s", "", text) in re.sub(r"\s", "", said)  # the text is there, a space apart


@EVERY
@pytest.mark.parametrize("number", [8, 9])
def test_odd_code_points_can_be_written(name, number):
    text = case(number)[0]["observation"]
    chat = CONTEXTS[name]().messages(text, [step(1, page=text, error=text)], text, jpeg(2))
    json.dumps(chat, ensure_ascii=False).encode()
    assert "broken" in text_of(chat) or "b" in text_of(chat)


def test_observations_as_the_browser_gives_them_stay_as_they_are():
    page = 'Submit 7 <button>\nUser 3 <input text> = "a < b"\nx 5 <checkbox> checked\n<-- 1 <2'
    assert PlaceholderContext().messages("g", [], page)[0]["content"] == f"Task: g\n{page}"


# --- The budget ---


def words(messages: list[dict]) -> int:
    """A policy to whom a word is a token and a picture is ten."""
    total = 0
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        total += sum(10 if part["type"] == "image" else len(part["text"].split()) for part in parts)
    return total


def lines(count: int, width: int = 1) -> str:
    return "\n".join(" ".join(["w"] * width) for _ in range(count))


class Plain(ContextManager):
    """History and page alone, to count tokens as the corpus does."""

    def render(self, goal, steps, page, screenshot, less):
        turns = [{"role": "assistant", "content": done.response} for done in steps[less:]]
        return self.chat(*turns, {"role": "user", "content": page})


def corpus(given_input: dict) -> Fit:
    steps = [Step("", "", [], response=lines(1, tokens)) for tokens in given_input["history"]]
    budget = Budget(words, given_input["budget"], given_input["reserve_for_answer"])
    return budget.fit(Plain(lines(1, given_input["system"])), "", steps, lines(given_input["observation"]))


def test_page_over_budget_case_of_the_corpus():
    given_input, expected = case(3)
    chat, cut, _ = corpus(given_input)
    page = chat[-1]["content"]
    assert len(page.split()) <= expected["observation_max"] and words(chat) <= 800
    assert len(page.split()) > expected["observation_max"] - 5  # and no more was cut than needed
    assert page.endswith("\n[page cut here]") and [len(m["content"].split()) for m in chat[:-1]] == [100, 50, 50]
    assert re.fullmatch(r"the last \d+ of 2000 lines of the page", cut)


def test_history_over_budget_case_of_the_corpus():
    given_input, expected = case(4)
    chat, cut, _ = corpus(given_input)
    kept = expected["history_kept_from_end"]
    assert [len(m["content"].split()) for m in chat] == [100, *[200] * kept, 150]
    assert cut == "the oldest 2 of 3 steps"


def test_what_fits_is_not_touched():
    for name, context in CONTEXTS.items():
        budget = Budget(words, 1000)
        chat, cut, _ = budget.fit(context(), "Buy tea", THREE, "page", jpeg(4))
        assert cut is None and chat == context().messages("Buy tea", THREE, "page", jpeg(4)), name


def test_the_page_keeps_half_the_room_and_history_goes_for_it():
    steps = [Step("", "", [], response=lines(1, 10)) for _ in range(20)]
    chat, cut, _ = Budget(words, 100).fit(Plain(), "", steps, lines(5000))
    # 100 less the last step (10) and the marker (3) leaves 87, of which the page has at least 43: five steps stay.
    assert cut == "the oldest 15 of 20 steps; the last 4953 of 5000 lines of the page" and words(chat) == 100


def test_each_rule_cuts_in_its_own_order():
    steps = [step(number) for number in range(1, 6)]

    def cut(context: ContextManager, tokens: int) -> tuple[list[int], str | None]:
        chat, said, _ = Budget(words, tokens).fit(context, "g", steps, "", jpeg(6))
        return pictures(chat), said

    whole = words(UITarsContext().messages("g", steps, "", jpeg(6)))
    assert cut(UITarsContext(), whole - 1) == ([3, 4, 5, 6], "the oldest 1 of 5 screenshots")
    pictures_left, said = cut(UITarsContext(), 40)
    assert pictures_left == [6] and re.fullmatch("the oldest 4 of 5 screenshots and the oldest [1-4] of 5 steps", said)
    whole = words(HiconAgentContext().messages("g", steps, "", jpeg(6)))
    assert cut(HiconAgentContext(), whole - 1) == ([2, 3, 4, 5, 6], "the oldest 1 screenshots of the history")
    whole = words(UITars2Context().messages("g", steps, "", jpeg(6)))
    assert cut(UITars2Context(), whole - 1)[1].startswith("1 of 5 steps of working memory, summed up")
    whole = words(WebGymContext(history_screenshots=4).messages("g", steps, "", jpeg(6)))
    assert cut(WebGymContext(history_screenshots=4), whole - 1) == ([4, 5, 6], "the oldest 1 of 3 rounds")
    for context in (ARPOContext(), WebGymContext(), AsyncWebRLContext()):  # these have nothing to give
        whole = words(context.messages("g", steps, "", jpeg(6)))
        assert cut(context, whole)[1] is None
        with pytest.raises(ContextOverflow, match=f"a prompt of {whole} tokens, {whole - 1} fit"):
            cut(context, whole - 1)


@pytest.mark.parametrize(
    ("name", "observation"), [*((name, None) for name in sorted(CONTEXTS)), *((name, "text") for name in VISUAL)]
)
@settings(max_examples=30, deadline=None)
@given(
    limit=st.integers(1, 1500),
    reserve=st.integers(0, 200),
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=30, max_size=30),
    width=st.integers(1, 8),
)
def test_thirty_steps_on_large_pages_never_exceed_the_budget(name, observation, limit, reserve, sizes, width):
    context = CONTEXTS[name]("Be brief.", **({"observation": observation} if observation else {}))
    budget = Budget(words, limit + reserve, reserve)
    steps: list[Step] = []
    for number, (said, seen) in enumerate(sizes, 1):
        page, told = lines(seen, width), "the button is grey" if number % 3 == 0 else None
        try:
            chat, cut, left = budget.fit(context, "Buy green tea", steps, page, jpeg(number))
        except ContextOverflow as error:
            assert re.search(rf"a prompt of \d+ tokens.*, {limit} fit|more than 15 screenshots", str(error))
            return
        assert words(chat) <= limit
        assert chat[0] == {"role": "system", "content": "Be brief."} and goal_of(chat) == "Buy green tea"
        if cut is None:
            assert chat == context.messages("Buy green tea", steps, page, jpeg(number))
        if context.shows_page and cut and "lines of the page" in cut:
            *kept, marker = chat[-1]["content"].split("\n")
            whole_lines = [line for line in kept if set(line.split()) == {"w"}]
            assert marker == "[page cut here]" and all(len(line.split()) == width for line in whole_lines)
            assert chat[-1]["content"].endswith(left) and len(left.split("\n")) <= seen
        elif context.shows_page:
            assert chat[-1]["content"].endswith(page) and left is None
        else:
            assert pictures(chat)[-1] == number
        response = f"Thought: {'so ' * said}\nMemory: tea\nAction: click(start_box='(1,{number})')"
        steps.append(Step("", page, [], response, Action("click", x=1, y=number), told, jpeg(number), shown=left))


def test_a_page_of_one_endless_line_is_left_out_whole():
    chat, cut, _ = Budget(words, 50).fit(WebRLContext(), "g", [], "w " * 5000)
    assert chat[0]["content"] == "Task: g\nPage:\n[page cut here]" and cut == "the last 1 of 1 lines of the page"


def test_the_counter_counts_what_the_chat_template_makes():
    tokenizer = build_tokenizer(["Task page"] * 5)
    count = chat_counter(tokenizer, tokens_per_picture=7)
    text = PlaceholderContext().messages("g", [], "page")
    ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert count(text) == len(ids)
    seen = WebGymContext().messages("g", [], "", jpeg(1))
    said = [{"role": "user", "content": "Task: g"}]
    assert count(seen) == count(said) + 7


def test_a_reserve_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="reserve = 10 is not allowed: 0 <= reserve < max_tokens = 10"):
        Budget(words, 10, 10)
