"""The page cases on real Chromium, with relatives of each kind: frames, shadow roots, what moves, hides or hangs.

A case says what a page is, what is done on it in terms of the observation, and what must hold then.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from webagent_core.browser.errors import ActionFailed, PageDied
from webagent_core.browser.page import PageLimits, WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import Action
from webagent_core.episode.contexts import PlaceholderContext
from webagent_core.policy.tokenizer import build_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDER = Path(__file__).parent / "cases" / "pages"
CASES = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]
LIMITS = PageLimits(action_seconds=6, load_seconds=30)
LINE = re.compile(r"^(?P<name>.*) (?P<id>[a-z]*[0-9]+) <(?P<kind>[^>]+)>(?P<state>.*)$")
KINDS = {  # of our notation, by the role that a case speaks of
    "button": ("button", "input submit", "input file"),
    "textbox": ("input text", "input date", "textarea", "textbox"),
    "combobox": ("select", "combobox"),
    "checkbox": ("checkbox",),
    "option": ("option",),
    "link": ("link",),
}


# --- Pages that are written by a test, and those of the cases, from one server ---------------------------------------


@dataclass
class Server:
    host: str = ""
    routes: dict[str, dict] = field(default_factory=dict)  # by path, in the words of the cases

    def page(self, name: str, body: str) -> str:
        """Put a page up and return its address."""
        self.routes[f"/{name}"] = {"body": f"<!doctype html><meta charset=utf-8><body>{body}"}
        return f"http://{self.host}/{name}"

    async def answer(self, request: web.Request) -> web.Response:
        route = self.routes.get(request.path)
        if route is None:
            return web.Response(status=404, text="there is no such page")
        await asyncio.sleep(route.get("delay_ms", 0) / 1000)
        if "until" in route:
            await route["until"].wait()
        headers = {"content-type": "text/html; charset=utf-8"} | route.get("headers", {})
        return web.Response(status=route.get("status", 200), body=route["body"].encode(), headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[list[Server]]:
    """Three origins; the pool below may reach the first two."""
    found = [Server(), Server(), Server()]
    for case in CASES:
        routes = {route["path"]: route for route in case["input"]["routes"]}
        assert not routes.keys() & found[0].routes.keys(), "two cases share a path"
        found[0].routes |= routes
        found[0].routes[f"/pages/{case['page']}"] = {"body": (FOLDER / case["page"]).read_text("utf-8")}
    runners = []
    for server in found:
        app = web.Application()
        app.router.add_get("/{path:.*}", server.answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        server.host = f"127.0.0.1:{runners[-1].addresses[0][1]}"
    yield found
    for runner in runners:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(servers: list[Server]) -> AsyncIterator[BrowserPool]:
    async with BrowserPool(pages=2, allowed_hosts=(servers[0].host, servers[1].host), limits=LIMITS) as pool:
        yield pool
        assert pool.launches == 1, "a page took the browser with it"


@pytest.fixture
def server(servers: list[Server]) -> Server:
    return servers[0]


# --- What a policy can do ---------------------------------------------------------------------------------------------


def elements(text: str) -> list[dict[str, str]]:
    return [found.groupdict() for line in text.splitlines() if (found := LINE.match(line))]


def plain(name: str) -> str:
    return " ".join(re.sub("[\u200b\ufeff]", "", name).split())


def the(text: str, name: str, kinds: tuple[str, ...] = ()) -> str:
    """Id of the one element of that name."""
    (found,) = [each for each in elements(text) if each["name"] == name and (not kinds or each["kind"] in kinds)]
    return found["id"]


async def do(page: WebPage, action: Action) -> str:
    """Act as an episode does, and return what is to be read then."""
    await page.act(action)
    await page.settle()
    return (await page.observe()).text


async def click(page: WebPage, name: str) -> str:
    return await do(page, Action("click", element=the((await page.observe()).text, name)))


async def type_into(page: WebPage, name: str, text: str) -> str:
    return await do(page, Action("type", element=the((await page.observe()).text, name), text=text))


async def within(page: WebPage, script: str, wanted: object, seconds: float = 3.0) -> object:
    """The script's value, as soon as it is the wanted one."""
    end = time.monotonic() + seconds
    while (value := await page.evaluate(script)) != wanted and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return value


# --- The cases --------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """A case on its way: the page, and everything that was to be read so far."""

    page: WebPage
    origin: str
    seen: str = ""  # newest observation
    log: str = ""  # all that came after the first

    async def look(self) -> str:
        seen = await self.page.observe()
        self.seen, self.log = seen.text, self.log + "\n" + seen.text
        return seen.text

    def element(self, step: dict) -> str:
        target = step["target"]
        name = plain(target.get("name") or step["text"])
        found = [each for each in elements(self.seen) if plain(each["name"]) == name]
        if "role" in target:
            allowed = {*KINDS[target["role"]], *step.get("role_may_be", ())}
            found = [each for each in found if each["kind"] in allowed]
        assert len(found) == 1, f"{step}: {found} in\n{self.seen[:2000]}"
        return found[0]["id"]

    def action(self, step: dict) -> Action:
        match step["do"]:
            case "click":
                return Action("click", element=self.element(step))
            case "type":
                return Action("type", element=self.element(step), text=step["text"], enter=step.get("enter", False))
            case "select":
                return Action("select", element=self.element(step), option=step["option"])
            case "scroll":
                return Action("scroll", direction=step["direction"])
            case "goto":
                url = step["url"]
                return Action("goto", url=url if url.startswith("http") else self.origin + url)
            case "back":
                return Action("back")
            case "wait":
                return Action("wait", seconds=step["seconds"])
        raise AssertionError(f"a step of an unknown kind: {step}")

    async def take(self, step: dict, limits: dict) -> str:
        """Do a step once and look; "" or the error that came of it."""
        action, error, started = self.action(step), "", time.monotonic()
        try:
            await self.page.act(action)
            await self.page.settle()
        except (ActionFailed, PageDied) as failed:
            error = f"{type(failed).__name__}: {failed}"
        assert time.monotonic() - started < limits["step_seconds"], f"{step} took too long"
        if not error.startswith("PageDied"):
            await self.look()
        return error


async def check(played: Played, step: dict, error: str) -> None:
    """Whether a step came out as its case says."""
    match step.get("expect"):
        case None:
            assert not error, f"{step}: {error}"
        case "blocked":
            assert "is covered by another one" in error and "cookies" in error
        case "not_possible":
            assert "is disabled" in error
        case "navigation_error":
            assert "not allowed here" in error or re.match(r"\[the page did not load: .*ERR_\w+\]$", played.seen)
        case "page_unresponsive":
            assert error.startswith("PageDied: ") and "took more than" in error
        case "error_or_iso":
            assert "takes a date as in 2031-04-09" in error
        case "no_history_is_not_an_error":
            assert "there is no earlier page" in error
        case other:
            raise AssertionError(f"an expectation of an unknown kind: {other}")
    for dialog in step.get("dialogs", ()):
        assert dialog.get("answer", True)
        assert f'[{dialog["type"]} dialog, answered with OK: "{dialog["message"]}"]' in played.log.splitlines()
    end = time.monotonic() + 3
    while step.get("downloads") and "a download was offered" not in played.log and time.monotonic() < end:
        await played.look()
    assert played.log.count("a download was offered") == step.get("downloads", 0)


@pytest.mark.parametrize("case", CASES, ids=[case["page"].removesuffix(".html") for case in CASES])
async def test_case_of_the_corpus(case, pool, servers):
    expected, limits = case["expected"], case["expected"]["limits"]
    origin, states = f"http://{servers[0].host}", [each["equals"] for each in expected["after"]]
    async with pool.page() as page:
        if case["kind"] == "js_infinite_loop":
            page.limits = replace(LIMITS, call_seconds=3)
        if {"blocked", "not_possible"} & {step.get("expect") for step in case["input"]["steps"]}:
            page.limits = replace(LIMITS, action_seconds=1)  # for so long it is waited for to become possible
        await page.goto(origin + case["input"]["start"])
        await page.settle()
        played, started = Played(page, origin), time.monotonic()
        first = await page.observe()
        assert time.monotonic() - started < limits["observe_seconds"]
        played.seen = first.text
        check_observation(first.title + "\n" + first.text, expected.get("observe", {}))
        for step in case["input"]["steps"]:
            if "until_visible" in step:
                wanted = plain(step["until_visible"]["name"])
                for _ in range(step["max_times"]):
                    if wanted in [each["name"] for each in elements(played.seen)]:
                        break
                    await check(played, step, await played.take(step, limits))
                continue
            if "delay_before_seconds" in step:  # or as soon as the page has changed, which is what the delay is for
                before = await page.evaluate("document.body.innerHTML")
                changed = f"document.body.innerHTML !== {json.dumps(before)}"
                await within(page, changed, True, step["delay_before_seconds"])
            for _ in range(step.get("max_times", 1)):
                if "repeat_until_js" in step and await page.evaluate(step["repeat_until_js"]):
                    break
                error = await played.take(step, limits)
                if "use_observation_from" in step:
                    assert "is no longer on this page" in error
                    states = [outcome["state"] for outcome in case["also_ok"]]
                else:
                    await check(played, step, error)
        for after, state in zip(expected["after"], states, strict=True):
            assert await within(page, after["js"], state) == state, after["js"]
        if "observe_after" in case:
            check_observation(played.log, case["observe_after"])
        if "tabs" in case:
            assert len(page.context.pages) == case["tabs"]["count"]
            assert await page.page.title() == case["tabs"]["active_title"]


def check_observation(text: str, wanted: dict) -> None:
    assert all(part in text for part in wanted.get("contains", ()))
    assert not any(part in text for part in wanted.get("not_contains", ()))
    assert len(text) <= wanted.get("max_chars", len(text))
    assert json.loads(json.dumps(text)) == text and text.encode().decode() == text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    if "special_ids_from_content" in wanted:
        tokenizer = build_tokenizer([text] * 3)
        special = [tokenizer(text)["input_ids"].count(each) for each in tokenizer.all_special_ids]
        assert sum(special) == wanted["special_ids_from_content"]
        # Nor does the chat that a policy is shown hold more of them than one about an empty page.
        chats = [PlaceholderContext().messages("Buy a teapot", [], page) for page in ("", text)]
        counts = [
            sum(ids.count(each) for each in tokenizer.all_special_ids)
            for ids in (
                tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"] for chat in chats
            )
        ]
        assert counts[0] == counts[1]


async def test_corpus_is_complete():
    assert len(CASES) == 35


# --- Frames -----------------------------------------------------------------------------------------------------------

FIELDS = """<label>Code <input></label><select><option>Small<option>Large</select>
<button onclick="top.postMessage(['input', 'select'].map(tag => document.querySelector(tag).value), '*')">Send</button>
<p style="height: 3000px">tall</p><button onclick="top.postMessage('low', '*')">Low</button>"""
LISTENS = "<script>got = []; onmessage = (event) => got.push(event.data)</script>"


@pytest.mark.parametrize("how", ["same origin", "nested", "sandboxed", "another origin", "another inside another"])
async def test_a_frame_is_read_and_used_as_part_of_the_page(how, servers, pool):
    here, there, _ = servers
    inner = {
        "same origin": lambda: f'src="{here.page("fields", FIELDS)}"',
        "nested": lambda: (
            f"""srcdoc='<p>in between</p><iframe width=400 height=150 src="{here.page("fields", FIELDS)}"></iframe>'"""
        ),
        "sandboxed": lambda: f"""sandbox="allow-scripts" src="{here.page("fields", FIELDS)}" """,
        "another origin": lambda: f'src="{there.page("fields", FIELDS)}"',
        "another inside another": lambda: f'src="{there.page("outer", nested(here.page("fields", FIELDS)))}"',
    }[how]()
    scaled = "position: absolute; left: 150px; top: 900px; border: 7px solid; padding: 5px; transform: scale(0.9)"
    url = here.page(
        "framed", f'{LISTENS}<h1>Before</h1><iframe style="{scaled}" width=500 height=200 {inner}></iframe><p>After'
    )
    async with pool.page() as page:
        await page.goto(url)
        await page.settle()
        text = (await page.observe()).text
        assert text.splitlines()[0] == "Before" and text.splitlines()[-1] == "After" and "tall" in text
        await type_into(page, "Code", "PK-77")
        await do(page, Action("select", element=the(text, "unnamed"), option="Large"))
        await click(page, "Send")
        assert await within(page, "got", [["PK-77", "Large"]]) == [["PK-77", "Large"]]
        await do(page, Action("scroll", element=the(text, "Code"), direction="down"))
        await click(page, "Low")
        assert await within(page, "got.length", 2) == 2
        # Ids of different frames are never the same.
        ids = [each["id"] for each in elements((await page.observe()).text)]
        assert len(set(ids)) == len(ids) == 4
        await page.evaluate("document.querySelector('iframe').remove()")
        with pytest.raises(ActionFailed, match="no element|no longer"):
            await page.act(Action("click", element=the(text, "Send")))


def nested(url: str) -> str:
    return f'<iframe width=450 height=170 src="{url}"></iframe>'


async def test_a_frame_of_a_forbidden_host_is_not_loaded_and_said_to_be_missing(servers, pool):
    here, _, forbidden = servers
    url = here.page("embeds", f"<p>shop</p>{nested(forbidden.page('secret', 'SECRET'))}<p>end</p>")
    async with pool.page() as page:
        await page.goto(url)
        await page.settle()
        assert (await page.observe()).text.splitlines() == ["shop", "[a frame that did not load]", "end"]


async def test_frames_count_towards_the_limits_and_what_covers_one_is_told(servers, pool):
    here, there, _ = servers
    frames = nested(there.page("long", "<button>Word</button>" * 300)) * 12
    cover = "<div style='position: fixed; inset: 0' id=cover>Cookies</div>"
    url = here.page("many", frames + cover)
    async with pool.page() as page:
        page.limits = replace(LIMITS, characters=6_000, frames=3)
        await page.goto(url)
        await page.settle()
        text = (await page.observe()).text
        assert len(text) < 7_000 and "[page cut here]" in text
        page.limits = LIMITS
        with pytest.raises(ActionFailed, match="frame is covered by another element, div"):
            await page.act(Action("click", element=elements(text)[0]["id"]))


# --- Shadow roots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["open", "closed"])
async def test_shadow_roots_in_one_another_with_slots_are_part_of_the_page(mode, server, pool):
    url = server.page(
        "shadows",
        f"""<x-outer><b>Given</b><button onclick="this.textContent = 'Given twice'">Slotted</button></x-outer><script>
        const define = (name, html, then) => customElements.define(name, class extends HTMLElement {{
          constructor() {{
            super();
            const root = this.attachShadow({{ mode: "{mode}" }});
            root.innerHTML = html;
            then?.(root);
          }}
        }});
        define("x-inner", "<span id=l>Amount</span><input aria-labelledby=l><button>Late</button><p></p>", (root) => {{
          const [field, button, p] = ["input", "button", "p"].map((tag) => root.querySelector(tag));
          button.onclick = () => setTimeout(() => {{ p.textContent = "came: " + field.value }}, 200);
        }});
        define("x-outer", "<h2>Lamp</h2><slot>nothing given</slot><x-inner></x-inner><slot name=none>fallback</slot>");
        </script>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        lines = (await page.observe()).text.splitlines()
        assert lines[0] == "Lamp" and "Given" in lines and lines[-1] == "fallback" and "nothing given" not in lines
        await type_into(page, "Amount", "3")
        assert "came: 3" in await click(page, "Late")  # what happens in a shadow root is waited for
        assert "Given twice" in await click(page, "Slotted")


# --- Names that are properties ----------------------------------------------------------------------------------------


async def test_names_on_a_page_do_not_take_the_place_of_properties(server, pool):
    names = "childNodes nodeType tagName attributes title labels matches parentNode textContent style id"
    fields = "".join(f"<input name={name} placeholder='the {name}'>" for name in names.split())
    url = server.page(
        "clobbered",
        f"""<form role=form>{fields}</form><form role=button onclick="ok = 1; return false">
        <input type=hidden name=title><input type=hidden name=labels>Press me</form>
        <img name=title alt=x><form name=body></form><form name=documentElement></form><img name=elementFromPoint>
        <script>performance.now = () => 5; requestAnimationFrame = () => 1; class Odd extends HTMLElement {{
          get labels() {{ throw 1 }} get placeholder() {{ throw 1 }} get disabled() {{ throw 1 }} }}
        customElements.define("x-odd", Odd)</script><x-odd role=button>Odd</x-odd>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        await page.settle()
        text = (await page.observe()).text
        assert [each["name"] for each in elements(text)] == [f"the {name}" for name in names.split()] + [
            "Press me",
            "Odd",
        ]
        await click(page, "Press me")
        await type_into(page, "the childNodes", "typed")
        assert await page.evaluate("[ok, document.querySelector('input').value]") == [1, "typed"]


async def test_what_nobody_sees_is_not_read(server, pool):
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "click 1")
    url = server.page(
        "unseen",
        f"""<p>a\u200bb\u202ec\u2066d{hidden}e</p><button>Pay\u00ad\u200e now{hidden}</button>
        <details><summary>More</summary><button>Inside</button></details><style>p::after {{ content: 'x' }}</style>
        <button style="opacity: 0">Ghost</button><button style="visibility: hidden">Ghost</button>
        <div style="display: none"><button>Ghost</button></div>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        assert (await page.observe()).text == "abcde\nPay now 1 <button>\nMore 2 <clickable>"
        assert "Inside 3 <button>" in await click(page, "More")


# --- Where a click goes -----------------------------------------------------------------------------------------------


async def test_labels_stand_for_boxes_that_are_hidden(server, pool):
    hidden = ("display: none", "opacity: 0", "position: absolute; clip-path: inset(50%); width: 1px; height: 1px")
    boxes = "".join(
        f"""<p><label><input type=checkbox id=b{n} style="{style}" onchange="log.push({n})"> Box {n}</label></p>
        <p><input type=radio name=r id=r{n} style="{style}" onchange="log.push('r{n}')">
        <label for=r{n}>Radio {n}</label></p>"""
        for n, style in enumerate(hidden)
    )
    terms = """<label><input type=checkbox id=terms> I accept the <a href="#terms">terms</a></label>"""
    url = server.page("labels", f"<script>log = []</script>{boxes}{terms}")
    async with pool.page() as page:
        await page.goto(url)
        for n in range(len(hidden)):
            assert f"Box {n} " in await click(page, f"Box {n}")
            text = await click(page, f"Radio {n}")
            assert [each["state"] for each in elements(text) if each["name"] == f"Radio {n}"] == [" checked"]
        assert await page.evaluate("log") == [each for n in range(len(hidden)) for each in (n, f"r{n}")]
        await click(page, "terms")
        assert await page.evaluate("location.hash") == "#terms"


async def test_what_is_around_other_elements_does_not_hide_them(server, pool):
    url = server.page(
        "around",
        """<div onclick="log.push('page')"><div style="cursor: pointer" onclick="log.push('card')"><h2>Desk lamp</h2>
        <button onclick="log.push('buy'); event.stopPropagation()">Buy</button></div>
        <div onclick="log.push('row')">Just a row</div>
        <a href="#x" style="display: contents"><i style="display: inline-block; width: 30px">Go</i></a></div>
        <script>log = []; document.body.style.cursor = "pointer"</script>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        names = [(each["name"], each["kind"]) for each in elements((await page.observe()).text)]
        assert names == [
            ("Desk lamp", "clickable"), ("Buy", "button"), ("Just a row", "clickable"), ("Go", "link"),
        ]  # fmt: skip
        for name in ("Desk lamp", "Buy", "Just a row", "Go"):
            await click(page, name)
        assert await page.evaluate("log") == ["card", "page", "buy", "row", "page", "page"]


@pytest.mark.parametrize(
    "css",
    [
        "li > ul { display: none } li:hover > ul { display: block }",
        "ul ul { visibility: hidden } @layer x {} .m:hover ul { visibility: visible }",
        "ul ul { opacity: 0; } .bar li.m:hover a, nav .m:hover > ul { opacity: 1 }",
    ],
)
async def test_what_opens_under_the_mouse_can_be_opened(css, server, pool):
    url = server.page(
        "menu",
        f"""<style>{css}</style>
        <nav class=bar><ul><li class=m>Products<ul><li><a href="#w">Widgets</a></li></ul></li></ul></nav>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        text = (await page.observe()).text
        assert [each["name"] for each in elements(text)] == ["Products"]
        assert "Widgets" in await click(page, "Products")
        await click(page, "Widgets")
        assert await page.evaluate("location.hash") == "#w"


async def test_what_never_rests_is_hit_all_the_same(server, pool):
    url = server.page(
        "restless",
        """<style>@keyframes far { from { translate: 0 } to { translate: 400px } }
        @keyframes grow { to { scale: 1.2 } } button { position: absolute; height: 60px; width: 120px }</style>
        <button style="animation: far 6s infinite alternate" onclick="hit.push('far')">Far</button>
        <button style="animation: grow .3s infinite alternate; top: 200px" onclick="hit.push('grows')">Grows</button>
        <script>hit = []</script>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        await click(page, "Far")
        await click(page, "Grows")
        assert await page.evaluate("hit") == ["far", "grows"]


async def test_a_page_that_scrolls_inside_is_scrolled_there(server, pool):
    url = server.page(
        "shell",
        """<style>body { margin: 0; overflow: hidden } #main { height: 100vh; overflow: auto }</style>
        <div id=main><div id=list style="width: 200px; height: 100px; overflow: auto"><button>Top</button>
        <p style="height: 900px">list</p></div><p style="height: 4000px">main</p></div>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        text = await do(page, Action("scroll", direction="down"))
        assert await page.evaluate("[main.scrollTop > 300, list.scrollTop]") == [True, 0]
        await do(page, Action("scroll", element=the(text, "Top"), direction="down"))
        assert await page.evaluate("list.scrollTop > 50")


# --- Large pages ------------------------------------------------------------------------------------------------------


async def test_what_was_cut_can_be_reached_by_scrolling(server, pool):
    rows = "h = ''; for (let i = 0; i < 9000; i++) h += `<tr><td>${i}<td><a href='#${i}'>view ${i}</a></tr>`;"
    url = server.page("rows", f"<table id=t></table><button>Last</button><script>{rows} t.innerHTML = h</script>")
    async with pool.page() as page:
        await page.goto(url)
        text = (await page.observe()).text
        assert "view 0 " in text and "Last" not in text and text.endswith("[page cut here]")
        await page.evaluate("scrollTo(0, document.body.scrollHeight)")
        text = (await page.observe()).text
        assert (
            text.startswith("[page above left out]")
            and "view 0 " not in text
            and text.splitlines()[-1].startswith("Last ")
        )
        await page.evaluate("document.body.innerHTML = '<div>'.repeat(400) + 'deep' + '</div>'.repeat(400) + 'after'")
        assert (await page.observe()).text == "after\n[page cut here]"


async def test_megabytes_anywhere_are_cut_in_time(server, pool):
    url = server.page(
        "fat",
        """<script>const big = "word ".repeat(40000); document.title = big; const add = (html) => {
          const box = document.createElement("div"); box.innerHTML = html; document.body.append(box);
          return box.firstChild };
        add("<button></button>").textContent = big; add("<input>").value = big; add("<p></p>").textContent = big;
        add("<a href=#></a>").title = big; add("<img>").alt = big; add("<button></button>").ariaLabel = big;
        const many = document.createElement("select"); document.body.append(many);
        for (let i = 0; i < 20000; i++) many.append(new Option("option " + i));
        history.replaceState(0, 0, "#" + "x".repeat(1e6))</script>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        started = time.monotonic()
        seen = await page.observe()
        assert time.monotonic() - started < LIMITS.call_seconds
        assert len(seen.text) < 10_000 and len(seen.title) < 250 and len(seen.url) <= 8000
        assert "and 19940 more" in seen.text
        with pytest.raises(ActionFailed) as told:
            await page.act(Action("type", element="99999", text="word " * 10_000))
        assert len(str(told.value)) < 400


# --- Coming to rest, hanging, not loading -----------------------------------------------------------------------------


async def test_what_a_click_puts_off_for_a_moment_is_waited_for_and_a_clock_is_not(server, pool):
    url = server.page(
        "later",
        """<button onclick="setTimeout(() => o.textContent = 'came', 400)">Soon</button><p id=o></p><p id=clock></p>
        <button onclick="clearTimeout(setTimeout(() => 0, 450))">Never</button>
        <script>const tick = () => { clock.dataset.now = Date.now(); setTimeout(tick, 300) }</script>
        <button onclick="tick()">Clock</button>""",
    )
    async with pool.page() as page:
        await page.goto(url)
        assert "came" in await click(page, "Soon")
        for name in ("Never", "Clock"):
            await page.act(Action("click", element=the((await page.observe()).text, name)))
            assert await page.settle()


async def test_a_tab_that_hangs_or_crashes_is_replaced_by_the_next_goto(server, pool):
    look = server.page("look", "<script>document.cookie ||= 'a=1'</script><button>Look</button>")
    spin = server.page("spin", "<button onclick='setTimeout(() => { for (;;); })'>Spin</button>")
    async with pool.page() as page:
        page.limits = replace(LIMITS, call_seconds=3)
        await page.goto(look)
        await page.goto(spin)
        with pytest.raises(PageDied):
            await click(page, "Spin")
        await page.goto(look)
        assert len(page.context.pages) == 1 and await page.evaluate("document.cookie") == "a=1"
        session = await page.context.new_cdp_session(page.page)
        crash = asyncio.ensure_future(session.send("Page.crash"))
        await asyncio.wait([crash], timeout=1)
        crash.cancel()
        with pytest.raises(PageDied):
            await page.observe()
        await page.act(Action("goto", url=look))
        assert (await page.observe()).text == "Look 1 <button>"
        with pytest.raises(ActionFailed, match="no earlier page"):
            await page.act(Action("back"))


async def test_a_page_that_did_not_load_is_said_to_be_none_and_can_be_left(servers, pool):
    here, _, forbidden = servers
    url = here.page("leaves", f'<a href="http://{forbidden.host}/secret">Away</a><a href="/nothing">Missing</a>')
    async with pool.page() as page:
        await page.goto(url)
        text = await click(page, "Away")
        assert re.fullmatch(r"\[the page did not load: http://\S+/secret: net::ERR_PROXY_CONNECTION_FAILED\]", text)
        assert (await page.observe(screenshot=True, html=True)).screenshot
        with pytest.raises(ActionFailed, match="no element 1"):
            await page.act(Action("click", element="1"))
        assert "Away" in await do(page, Action("back"))
        assert await click(page, "Missing") == "there is no such page"


async def test_a_page_on_its_way_is_said_to_be(server, pool):
    server.routes["/late"] = {"body": "late", "until": asyncio.Event()}
    url = server.page("hurried", "<a href=/late>Late</a>")
    async with pool.page() as page:
        page.limits = replace(LIMITS, settle_seconds=0.3, action_seconds=0.3)
        await page.goto(url)
        assert await click(page, "Late") == "Late 1 <link>\n[the next page is still loading]"
        assert await do(page, Action("wait", seconds=0.0)) == "Late 1 <link>\n[the next page is still loading]"
        with pytest.raises(ActionFailed, match="the next page is still loading"):
            await page.act(Action("click", element="1"))
        server.routes["/late"]["until"].set()
        assert await within(page, "document.body.textContent", "late") == "late"
        assert await do(page, Action("wait", seconds=0.0)) == "late"


async def test_files_windows_and_fields_tell_what_they_want(server, pool):
    url = server.page(
        "wants",
        """<input type=file aria-label=Photo><input type=date aria-label=Day><input type=number aria-label=Count>
        <input type=checkbox aria-label=Box><input aria-label=Fixed readonly value=1>
        <div contenteditable aria-label=Note>old</div>
        <button onclick="for (let i = 0; i < 9; i++) window.open('/look')">Storm</button>""",
    )
    server.page("look", "look")
    async with pool.page() as page:
        await page.goto(url)
        text = await click(page, "Photo")
        text = text if "asked for a file" in text else (await page.observe()).text
        assert "[the page asked for a file; there is none to give]" in text and 'Note 6 <textbox> = "old"' in text
        page.limits = replace(LIMITS, action_seconds=1)  # a field that cannot be written to may become one that can
        wrong = {"Photo": "x", "Day": "9 April", "Count": "many", "Box": "on", "Fixed": "2"}
        told = {}
        for name, words in wrong.items():
            with pytest.raises(ActionFailed) as failed:
                await page.act(Action("type", element=the(text, name), text=words))
            told[name] = str(failed.value)
        assert "this field takes a date as in 2031-04-09" in told["Day"] and "takes a number" in told["Count"]
        assert all(len(message.splitlines()) == 1 for message in told.values())
        page.limits = LIMITS
        await type_into(page, "Note", "new")
        assert await page.evaluate("document.querySelector('[contenteditable]').textContent") == "new"
        await page.act(Action("click", element=the((await page.observe()).text, "Storm")))
        await page.settle()
        assert 1 < len(page.context.pages) <= LIMITS.tabs
        assert "[a new window was closed; 4 are open]" in (await page.observe()).text
