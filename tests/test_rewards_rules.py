"""WebArena's rules: the shared cases, each for its whole kind, with relatives of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
