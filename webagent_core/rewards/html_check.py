"""WebArena's program checks on the page as it stood at the end: an element of it against what it should hold.

WebArena's locators are JavaScript. Those that only pick an element and read it are read here without a browser, so
that a frozen page can be checked at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from webagent_core.rewards.string_match import check_references, exact_match, must_include

_LOCATOR = re.compile(
    r"""\s*document\.querySelector(?P<all>All)?\(\s*(?P<quote>["'`])(?P<css>.+?)(?P=quote)\s*\)"""
    r"""(?:\[(?P<index>\d+)\])?\??\.(?P<what>outerText|innerText|textContent|value|checked|href|innerHTML|outerHTML)\s*;?\s*"""
)


def html_check(check: Mapping[str, Any], html: str) -> tuple[bool, str]:
    """Whether the page passes, and what was found where the check looks.

    Args:
        check: `locator` ("" for the text of the whole page, a CSS selector, or JavaScript of the form
            `document.querySelector("css").outerText`) and `required_contents`: {"exact_match": text} or
            {"must_include": [text, ...]}.
        html: the document.

    Raises:
        ValueError: the check is not of this form.
    """
    try:
        from selectolax.lexbor import LexborHTMLParser, SelectolaxError
    except ModuleNotFoundError:
        raise ModuleNotFoundError("HTML checks need the package selectolax: pip install 'webagent-rl[judge]'") from None
    unknown = set(check) - {"locator", "required_contents", "url"}
    if unknown or "required_contents" not in check:
        raise ValueError(f"program_html: {dict(check)!r} is not allowed: locator, required_contents and perhaps url")
    wanted = check_references(check["required_contents"])
    if "fuzzy_match" in wanted:
        raise ValueError("program_html.required_contents: fuzzy_match is not allowed: exact_match or must_include")
    locator = str(check.get("locator", "")).strip()
    script = _LOCATOR.fullmatch(locator)
    if not script and re.search(r"\bdocument\b|=>|\)\.", locator):
        raise ValueError(
            f"program_html.locator = {locator!r} is not allowed: nothing, a CSS selector, or JavaScript of the form "
            'document.querySelector("css").outerText'
        )
    tree = LexborHTMLParser(html)
    for hidden in tree.css("script, style, template, noscript"):
        hidden.decompose()
    css = script["css"].replace("\\", "") if script else locator
    try:
        found = tree.css(css) if css else [tree.body or tree.root]
    except (SelectolaxError, ValueError) as error:
        raise ValueError(f"program_html.locator = {locator!r} is no CSS selector: {error}") from None
    index = int(script["index"] or 0) if script else 0
    if index >= len(found) or found[index] is None:
        return False, "no such element"
    text = _read(found[index], script["what"] if script else "outerText")
    met = all(
        exact_match(value, text) if kind == "exact_match" else all(must_include(v, text, value) for v in value)
        for kind, value in wanted.items()
    )
    return met, text[:200]


def _read(element: Any, what: str) -> str:
    attributes = element.attributes
    if what in ("outerHTML", "innerHTML"):
        return (element.html if what == "outerHTML" else element.inner_html) or ""
    if what == "href":
        return attributes.get("href") or ""
    if what == "checked":
        return "true" if "checked" in attributes else "false"
    if what == "value" and element.tag == "select":
        options = element.css("option")
        chosen = [option for option in options if "selected" in option.attributes] or options[:1]
        return (chosen[0].attributes.get("value") or chosen[0].text(strip=True)) if chosen else ""
    if what == "value" and "value" in attributes:
        return attributes["value"] or ""
    return " ".join(element.text(separator=" ").split())
