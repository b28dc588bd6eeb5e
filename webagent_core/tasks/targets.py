"""Where to press in the MiniWoB++ tasks that can be done by looking and pointing: what a demonstrator has to know."""

from __future__ import annotations

# The element to press next, found in the page from the goal and from how the page is now. JavaScript, one expression.
TARGETS = {
    "miniwob/click-button-sequence": "document.querySelector(buttonsPushed.length ? '#subbtn2' : '#subbtn')",
    "miniwob/click-collapsible": "document.querySelector("
    "document.querySelector('.ui-accordion-header-active') ? '#subbtn' : '.ui-accordion-header')",
    "miniwob/click-color": "document.querySelector(`#area [data-color=${goal.match(/the (\\w+) colored/)[1]}]`)",
    "miniwob/click-dialog": "document.querySelector('.ui-dialog-titlebar button')",
    "miniwob/click-dialog-2": "goal.includes('\"x\"') ? document.querySelector('.ui-dialog-titlebar button') : "
    "[...document.querySelectorAll('.ui-dialog-buttonpane button')].find(b => goal.includes(`\"${b.textContent}\"`))",
    "miniwob/click-tab": "[...document.querySelectorAll('#area ul a')].find(tab => goal.includes(tab.textContent))",
    "miniwob/click-test": "document.querySelector('#subbtn')",
    "miniwob/click-test-2": "document.querySelector('#subbtn')",
    "miniwob/click-widget": "document.querySelector(`#area [data-type=${goal.match(/\"(.*)\"/)[1]}]`)",
    "miniwob/focus-text": "document.querySelector('#tt')",
    "miniwob/focus-text-2": "document.querySelector('#tt' + goal.match(/\\d/)[0])",
}


def check_shown(name: str) -> str:
    """Return `name`, or raise ValueError if nobody can show where to press in that task."""
    if name not in TARGETS:
        raise ValueError(f"task {name!r} has no demonstrator who points; there are {', '.join(sorted(TARGETS))}")
    return name
