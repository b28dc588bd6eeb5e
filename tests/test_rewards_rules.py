"""WebArena's rules: the shared cases, each for its whole kind, with relatives of ours."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.rewards import RewardError, score_all
from webagent_core.rewards.html_check import html_check
from webagent_core.rewards.rules import WebArenaReward
from webagent_core.rewards.string_match import string_match
from webagent_core.rewards.url_match import url_match

CASES = Path(__file__).parent / "cases"


def cases(name: str) -> list[dict]:
    return json.loads((CASES / f"{name}.json").read_text("ascii"))


def by_id(case: dict) -> str:
    return f"{case['id']}-{case['kind']}"


def right(case: dict) -> list:
    return [case["expected"]["right"], *(other["right"] for other in case.get("also_ok", []) if "right" in other)]


@pytest.mark.parametrize("case", cases("string_match"), ids=by_id)
def test_string_match_agrees_with_the_cases(case):
    references, answer = case["input"]["reference_answers"], case["input"]["answer"]
    if case["expected"].get("error") == "config":
        with pytest.raises(ValueError, match="reference_answers"):
            string_match(references, answer)
    else:
        assert string_match(references, answer) in right(case)
        assert string_match(references, answer, "released") == case["expected"]["released"]


@pytest.mark.parametrize("case", cases("url_match"), ids=by_id)
def test_url_match_agrees_with_the_cases(case):
    given = case["input"]
    at_stop = given.get("final_url_at_stop", given["final_url"])
    assert url_match(given["reference_url"], given["final_url"], "released") == case["expected"]["released"]
    if case["expected"].get("error") == "config":
        with pytest.raises(ValueError, match="reference_url"):
            url_match(given["reference_url"], at_stop)
    else:
        assert url_match(given["reference_url"], at_stop) in right(case)


async def reward_of(evaluation: dict, **fields) -> float | None:
    """What a run would get; None where it is left to a judge, which is not there."""
    (reward,) = await score_all(WebArenaReward({"shop/1": evaluation}), [Trajectory("shop/1", 0, "shop/1#0", **fields)])
    assert reward.valid == (reward.value is not None)
    return reward.value


@pytest.mark.parametrize("case", cases("string_match"), ids=by_id)
async def test_the_manager_gives_what_the_cases_say_of_answers(case):
    evaluation = {"reference_answers": case["input"]["reference_answers"]}
    fields = {"answer": case["input"]["answer"], "exit_status": ExitStatus.ANSWERED}
    if case["expected"].get("error") == "config":
        with pytest.raises(RewardError, match=r"WebArenaReward\.score of shop/1 .*reference_answers"):
            await reward_of(evaluation, **fields)
    else:
        assert await reward_of(evaluation, **fields) in right(case)


@pytest.mark.parametrize("case", cases("url_match"), ids=by_id)
async def test_the_manager_grades_the_page_of_the_first_finish(case):
    case_url = case["input"].get("final_url_at_stop", case["input"]["final_url"])
    visited = [*case["input"].get("history", ()), case["input"]["final_url"]]
    fields = {
        "steps": [Step(url, "", []) for url in visited],
        "final": FinalPage(case_url),
        "exit_status": ExitStatus.ANSWERED,
    }
    evaluation = {"reference_url": case["input"]["reference_url"]}
    if case["expected"].get("error") == "config":
        with pytest.raises(RewardError, match="reference_url"):
            await reward_of(evaluation, **fields)
    else:
        assert await reward_of(evaluation, **fields) in right(case)


# ------------------------------------------------------------------------------------------------ whole kinds

at_leisure = settings(deadline=None)  # the machine may have more to do
words = st.text("abcdefgxyz", min_size=2, max_size=8)
phrases = st.lists(words, min_size=1, max_size=4)
numbers = st.integers(0, 10**7)


@at_leisure
@given(phrases, words)
def test_exact_match_is_of_the_whole_answer_however_it_is_written(phrase, other):
    wanted = {"exact_match": " ".join(phrase).title()}
    same = " ".join(phrase)
    for answer in (same.upper(), f"  {same}\n", "  ".join(phrase), f'"{same}"', f"'{same}'", f"{same}."):
        assert string_match(wanted, answer) == 1
    for answer in (f"{same} {other}", f"{other} {same}", f"{same}{other}", " ".join(phrase[1:]), "", f"It is {same}"):
        assert string_match(wanted, answer) == 0
    assert string_match(wanted, same.upper(), "released") == 1
    assert string_match(wanted, f"{same} {other}", "released") == 0


@at_leisure
@given(numbers, st.integers(1, 9))
def test_a_number_is_equal_by_value_and_never_a_part_of_another(number, digit):
    exact, included = {"exact_match": str(number)}, {"must_include": [str(number)]}
    same = (f"{number:,}", f"${number}.00", f"{number}", f"{number}.0")
    for answer in same:
        assert string_match(exact, answer) == 1
        assert string_match(included, f"It is {answer} in all.") == 1
    for answer in (f"{number}{digit}", f"{number}.5", f"-{number + 1}", f"{number + 1}"):
        assert string_match(exact, answer) == 0
        assert string_match(included, f"It is {answer} in all.") == 0


@at_leisure
@given(phrases, words, words)
def test_must_include_is_of_whole_words_side_by_side(phrase, one, other):
    wanted = {"must_include": [" ".join(phrase)]}
    shown = " ".join(phrase)
    assert string_match(wanted, f"{one} {shown.upper()}, {other}") == 1
    assert string_match({"must_include": [f"quite other |OR| {shown}"]}, f"{one} {shown}") == 1
    for glued in (f"q{shown}", f"{shown}q"):  # no q is in any word
        assert string_match(wanted, glued) == 0
        assert string_match(wanted, glued, "released") == 1  # the published rule looks for the characters
    assert string_match({"must_include": [shown, "quite other"]}, f"{one} {shown}") == 0
    assert string_match(wanted, "") == 0


segments = st.lists(st.text("abcXY-_~ é", min_size=1, max_size=5).map(lambda s: f"p{s}p"), max_size=4)
queries = st.lists(st.tuples(st.sampled_from("abc"), st.text("xyz &=é", min_size=1, max_size=4)), max_size=4)


def address(path: list[str], query: list[tuple[str, str]], *, host: str = "shop.test", safe: str = "") -> str:
    where = f"http://{host}/{'/'.join(quote(each, safe=safe) for each in path)}"
    return f"{where}?{urlencode(query)}" if query else where


@at_leisure
@given(segments, queries, st.randoms(use_true_random=False))
def test_an_address_is_the_same_page_however_it_is_written_and_no_other(path, query, random):
    wanted = address(path, query)
    shuffled = random.sample(query, len(query))
    same = [
        address(path, shuffled),
        address(path, query + [("utm", "1")]),
        address(path, query, host="SHOP.test:80"),
        address(path, query, safe="~é -_"),
        address([*path, ""], query),
        address([".", *path], query),
        address([*path, "elsewhere", ".."], query),
        address(path, query) + "#top",
        address(path, query).replace("http:", "https:"),
    ]
    for url in same:
        assert url_match(wanted, url) == url_match(f"http://other.test/ |OR| {wanted}", url) == 1, url
    other = [
        address([*path, "elsewhere"], query),
        address(["elsewhere", *path], query),
        address(path, query, host="shop.test:8080"),
        address(path, query, host="a.shop.test"),
        address(path, query, host="shop.test.evil.test"),
        f"http://evil.test/?next={quote(wanted)}",
        f"http://evil.test/{wanted}",
    ]
    for at, (name, value) in enumerate(query):
        rest = [*query[:at], *query[at + 1 :]]
        other += [address(path, rest), address(path, [*rest, (name, value + "q")])]
    if path:
        other += [address(path[:-1], query), address([*path[:-1], path[-1] + "q"], query)]
    for url in other:
        assert url_match(wanted, url) == 0, url


@pytest.mark.parametrize(
    ("references", "answer", "expected"),
    [
        ({"exact_match": "12"}, "12.0", 1),
        ({"exact_match": "12"}, "twelve", 0),
        ({"exact_match": "34 cm"}, "34 kg", 0),
        ({"exact_match": "34"}, "34 thousand", 0),
        ({"exact_match": "34"}, "34k", 0),
        ({"exact_match": "Yes"}, "no", 0),
        ({"exact_match": "€5"}, "5.00", 1),
        ({"exact_match": "10:30"}, "10:45", 0),
        ({"exact_match": "a"}, "'A'", 1),
        ({"must_include": ["3"]}, "-3 degrees", 0),
        ({"must_include": ["7"]}, "1.7.2", 0),
        ({"must_include": ["1.2"]}, "version 1.20", 1),
        ({"must_include": ["100"]}, "1,000", 0),
        ({"must_include": ["1000"]}, "1,000.00", 1),
        ({"must_include": ["car"]}, "a car.", 1),
        ({"must_include": ["New York"]}, "York New", 0),
        ({"must_include": ["new york"]}, "in New\nYork, NY", 1),
        ({"must_include": ["41", "42"]}, "41 or 42", 1),
        ({"must_include": ["42"]}, "41 or 42", 0),
        ({"must_include": ["42"]}, "rooms 41 and 42", 1),
        ({"must_include": ["red |OR| blue", "7"]}, "7 blue ones", 1),
        ({"must_include": ["red |OR| blue"]}, "green", 0),
        ({"must_include": ["$"]}, "cost: $", 1),
        ({"must_include": ["咖啡"]}, "一杯咖啡", 0),
        ({"exact_match": "5", "must_include": ["x"]}, "5", 0),
        ({"fuzzy_match": ["N/A"]}, "n/a.", 1),
        ({"must_include": ["5"], "fuzzy_match": ["five"]}, "6", 0),
        ({"must_include": ["5"], "fuzzy_match": ["five"]}, "5", None),
        ({"must_include": ["ok"]}, "   ", 0),
    ],
)
def test_string_match_reads_answers_as_a_person_would(references, answer, expected):
    assert string_match(references, answer) == expected


@pytest.mark.parametrize(
    "references",
    [None, {}, [], {"must_include": "5"}, {"must_include": []}, {"must_include": [""]}, {"exact_match": ["a"]},
     {"exact_match": "  "}, {"exact": "a"}, {"must_include": [3]}],
)  # fmt: skip
def test_broken_references_are_named(references):
    with pytest.raises(ValueError, match="reference_answers"):
        string_match(references, "5")


@pytest.mark.parametrize(
    ("reference", "url", "expected"),
    [
        ("http://a.test/x", "http://a.test/x?", 1),
        ("http://a.test", "http://a.test/", 1),
        ("http://a.test/", "http://a.test/x", 0),
        ("http://a.test/x", "http://b.a.test/x", 0),
        ("http://a.test/x", "http://a.test.evil.test/x", 0),
        ("http://a.test/x", "http://a.test@evil.test/x", 0),
        ("http://a.test/x", "http://user:pw@a.test/x", 1),
        ("http://a.test/x/../../y", "http://a.test/y", 1),
        ("http://a.test/a%2Fb", "http://a.test/a/b", 0),
        ("http://a.test/#/inbox", "http://a.test/#/sent", 0),
        ("http://a.test/#/inbox", "http://a.test/#/inbox", 1),
        ("http://a.test/s?q=a&q=a", "http://a.test/s?q=a", 0),
        ("http://a.test/s?q=A", "http://a.test/s?q=a", 0),
        ("http://a.test/s?Q=a", "http://a.test/s?q=a", 0),
        ("http://a.test/x|OR|http://a.test/y", "http://a.test/y", 1),
        ("http://a.test:443/x", "https://a.test/x", 0),
        ("https://a.test:443/x", "https://a.test/x", 1),
        ("http://a.test/x", "http://a.test:99999/x", 0),
        ("http://a.test/x", "about:blank", 0),
        ("http://a.test/x", "data:text/html,http://a.test/x", 0),
        ("http://a.test/x", "view-source:http://a.test/x", 0),
        ("http://[::1]:80/x", "http://[::1]/x", 1),
    ],
)
def test_url_match_compares_addresses_as_a_browser_means_them(reference, url, expected):
    assert url_match(reference, url) == expected


@pytest.mark.parametrize("reference", ["", " ", "cart", "http://", "http://a.test/x |OR| ", "ftp://a.test/x"])
def test_a_reference_that_is_no_address_is_named(reference):
    with pytest.raises(ValueError, match="reference_url"):
        url_match(reference, "http://a.test/x")


# ------------------------------------------------------------------------------------------------ HTML checks

PAGE = """<!doctype html><title>Order</title><style>p { content: "Paid" }</style>
<div id="total" class="sum a">Total: <b>12.50</b> EUR</div><p>Order   placed</p><p>Thanks</p>
<input name="mail" value="lena@a.test"><input type=checkbox name=gift checked>
<select id="size"><option value="s">Small</option><option value="l" selected>Large</option></select>
<a class="next" href="/orders">next</a><script>var x = "Refunded";</script>"""


@pytest.mark.parametrize(
    ("locator", "required", "passes"),
    [
        ("", {"must_include": ["Order placed", "Thanks"]}, True),
        ("", {"must_include": ["Refunded"]}, False),  # a script's text is not on the page
        ("", {"must_include": ["Paid"]}, False),
        ("#total", {"exact_match": "Total: 12.50 EUR"}, True),
        ("#total", {"must_include": ["12.5"]}, True),
        ("div.sum.a > b", {"exact_match": "12.50"}, True),
        ("#missing", {"must_include": ["12.50"]}, False),
        ('document.querySelector("#total").outerText', {"must_include": ["12.50"]}, True),
        ("document.querySelector('[name=\"mail\"]').value", {"exact_match": "lena@a.test"}, True),
        ("document.querySelectorAll('p')[1].innerText", {"exact_match": "Thanks"}, True),
        ("document.querySelectorAll('p')[7].innerText", {"exact_match": "Thanks"}, False),
        ("document.querySelector('#size').value", {"exact_match": "l"}, True),
        ("document.querySelector('[name=gift]').checked", {"exact_match": "true"}, True),
        ("document.querySelector('a.next').href", {"exact_match": "/orders"}, True),
        ("document.querySelector('#nothing')?.outerText", {"exact_match": "x"}, False),
        ("document.querySelector('#total b').innerHTML", {"exact_match": "12.50"}, True),
        ("document.querySelector('#total b').outerHTML", {"exact_match": "<b>12.50</b>"}, True),
    ],
)
def test_html_checks_read_the_frozen_page(locator, required, passes):
    assert html_check({"locator": locator, "required_contents": required}, PAGE)[0] is passes


@pytest.mark.parametrize(
    "check",
    [
        {},
        {"locator": "p"},
        {"locator": "p", "required_contents": {}},
        {"locator": "p[", "required_contents": {"exact_match": "x"}},
        {"locator": "(() => document.title)()", "required_contents": {"exact_match": "x"}},
        {"locator": "p", "required_contents": {"fuzzy_match": "x"}},
        {"locator": "p", "required_contents": {"exact_match": "x"}, "prep": "wait"},
    ],
)
def test_a_check_that_cannot_be_read_is_named(check):
    with pytest.raises(ValueError, match="program_html|reference_answers"):
        html_check(check, PAGE)


@pytest.mark.parametrize("page", ["", "<", "<p>", "<p" * 2000, "\x00", "<html></html>", "plain words"])
def test_any_page_can_be_checked(page):
    assert html_check({"locator": "p", "required_contents": {"exact_match": "x"}}, page)[0] is False


def ended(url: str = "http://a.test/order", html: str = PAGE, answer: str | None = "12.50") -> Trajectory:
    return Trajectory(
        "shop/1", 0, "shop/1#0", answer=answer, exit_status=ExitStatus.ANSWERED, final=FinalPage(url, html=html)
    )


EVALUATION = {
    "reference_answers": {"must_include": ["12.5"]},
    "reference_url": "http://a.test/order",
    "program_html": [{"locator": "#total", "required_contents": {"must_include": ["EUR"]}}],
}


async def test_all_rules_of_a_task_must_hold():
    wrong = [
        ended(answer="13"),
        ended(answer=None),
        ended(url="http://a.test/cart"),
        ended(html="<p>Cart"),
        Trajectory("shop/1", 0, "g", answer="12.50", exit_status=ExitStatus.TASK_TIMEOUT),  # saw no page
    ]
    rewards = await score_all(WebArenaReward({"shop/1": EVALUATION}), [ended(), *wrong])
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [each["met"] for each in rewards[1].evidence] == [True, True, False]


async def test_the_page_is_that_of_the_first_finish_or_else_what_the_last_step_saw():
    manager = WebArenaReward({"shop/1": {"reference_url": "http://a.test/order"}})
    steps = [Step("http://a.test/order", "", []), Step("http://a.test/cart", "", [])]
    moved_on, unrecorded = ended(), ended()
    moved_on.steps, unrecorded.steps, unrecorded.final = steps, steps, None
    assert [reward.value for reward in await score_all(manager, [moved_on, unrecorded])] == [1.0, 0.0]


@pytest.mark.parametrize(
    "evaluation",
    [{}, [], {"url": "x"}, {"reference_url": ""}, {"reference_answers": "x"}, {"program_html": [{"locator": "p"}]}],
)
async def test_a_broken_evaluation_is_a_mistake_of_the_task_set(evaluation):
    with pytest.raises(RewardError, match="shop/1"):
        await score_all(WebArenaReward({"shop/1": evaluation}), [ended()])


async def test_a_page_that_was_not_recorded_cannot_be_checked():
    with pytest.raises(RewardError, match="final.html"):
        await score_all(WebArenaReward({"shop/1": EVALUATION}), [ended(html="")])
