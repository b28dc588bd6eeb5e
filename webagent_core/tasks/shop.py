"""A django-oscar shop as a site: things to compare, put into a cart and buy, a book of addresses, orders and reviews.

`SHOP` is what a task set needs to know; `App` runs in the server process (see site_server.py), with what Django needs
in shop_site. The shop is made once, with its people and its shelves. An episode's own is a copy in which the seed
decides what is on the shelves and for how much, where a customer lives and what was ordered before. A task is done if
the database holds exactly what was asked for: nothing less, and no other order, address, review or thing in a cart.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webagent_core.tasks.site import PEOPLE, SiteKind, log_in, same_answer

_CATEGORIES = {"Mugs": "mug", "Lamps": "lamp", "Bags": "bag", "Pens": "pen", "Clocks": "clock", "Chairs": "chair",
               "Kites": "kite", "Towels": "towel"}  # fmt: skip
_SHELVES, _EACH = 4, 4  # categories that a shop has, and products of each
_SORTS = ("Red", "Blue", "Green", "Tall", "Small", "Round", "Plain", "Old", "Folding", "Heavy", "Light", "Striped")
_STREETS = ("Mill Lane", "Hill Road", "Park Street", "Church Row", "Bridge Street", "Station Road")
_TOWNS = {"Leeds": "LS", "York": "YO", "Bath": "BA", "Derby": "DE", "Exeter": "EX", "Oxford": "OX"}
_TITLES = ("As described", "Very good", "Not for me", "A fine present", "Better than the last one")
_TEXTS = ("It came within two days.", "The colour is right.", "I use it every morning.", "It broke after a week.")


@dataclass
class Product:
    title: str
    price: str  # in pounds
    stock: int


@dataclass
class Address:
    street: str  # with the number
    town: str
    postcode: str


@dataclass
class Order:
    number: str
    street: str
    lines: list[tuple[str, int]]  # title and quantity


@dataclass
class State:
    """A shop as one customer sees it.

    Args:
        person: one of PEOPLE.
        categories: of _CATEGORIES.
        products: those of the first category, then those of the second...
        cart: quantities by title.
        reviews: (title of the product, stars, title, text) of each.
    """

    person: str
    categories: list[str]
    products: list[Product]
    addresses: list[Address]
    orders: list[Order]
    cart: dict[str, int] = field(default_factory=dict)
    reviews: list[tuple[str, int, str, str]] = field(default_factory=list)

    def of_category(self, category: str) -> list[Product]:
        first = _EACH * self.categories.index(category)
        return self.products[first : first + _EACH]


@dataclass
class Asked:
    """A task of an episode: its words, the shop when it is done, and what is to be said at the end."""

    goal: str
    state: State
    answer: str | None = None


def draw_state(rng: random.Random) -> State:
    """A shop with two addresses, three orders and an empty cart; within a category all prices differ."""
    products, categories = [], rng.sample(list(_CATEGORIES), _SHELVES)
    for category in categories:
        sorts, pounds = rng.sample(_SORTS, _EACH), rng.sample(range(3, 60), _EACH)
        for sort, price in zip(sorts, pounds, strict=True):
            title, pence = f"{sort} {_CATEGORIES[category]}", rng.choice(("00", "25", "50", "95"))
            products.append(Product(title, f"{price}.{pence}", rng.randrange(10, 60)))
    streets = rng.sample(_STREETS, 2)
    addresses = [
        Address(_numbered(street, rng), town, _postcode(town, rng))
        for street, town in zip(streets, rng.sample(list(_TOWNS), 2), strict=True)
    ]
    orders = [
        Order(
            str(number),
            rng.choice(addresses).street,
            [(product.title, rng.randrange(1, 10)) for product in rng.sample(products, 2)],
        )
        for number in rng.sample(range(20000, 30000), 3)
    ]
    return State(rng.choice(list(PEOPLE)), categories, products, addresses, orders)


def _numbered(street: str, rng: random.Random) -> str:
    return f"{rng.randrange(1, 90)} {street}"


def _postcode(town: str, rng: random.Random) -> str:
    return f"{_TOWNS[town]}{rng.randrange(1, 10)} {rng.randrange(1, 10)}{rng.choice('ABDEF')}{rng.choice('GHJLN')}"


# What is asked, a function a task. `before` is the shop that the episode begins with; `after`, a copy of it to be
# changed, the one that it is to end with.


def _buy(before: State, after: State, rng: random.Random) -> Asked:
    product, address = rng.choice(before.products), rng.choice(before.addresses)
    after.orders.append(Order("new", address.street, [(product.title, 1)]))
    return Asked(f'buy one "{product.title}" and have it sent to your address in "{address.town}"', after)


def _compare(before: State, after: State, rng: random.Random) -> Asked:
    category, (which, best) = rng.choice(before.categories), rng.choice([("cheapest", min), ("most expensive", max)])
    product = best(before.of_category(category), key=lambda each: float(each.price))
    after.cart = {product.title: 1}
    return Asked(f'put one piece of the {which} product in "{category}" into the cart', after)


def _edit_cart(before: State, after: State, rng: random.Random) -> Asked:
    titles = [product.title for product in rng.sample(before.products, 3)]  # this task alone begins with a cart
    before.cart = {title: rng.randrange(1, 5) for title in titles}
    changed, removed = rng.sample(titles, 2)
    count = rng.choice([count for count in range(2, 10) if count != before.cart[changed]])
    after.cart = {title: quantity for title, quantity in before.cart.items() if title != removed} | {changed: count}
    goal = f'in the cart, change the quantity of "{changed}" to "{count}" and remove "{removed}"'
    return Asked(goal, after)


def _edit_address(before: State, after: State, rng: random.Random) -> Asked:
    address = rng.choice(after.addresses)
    unused = [street for street in _STREETS if not any(street in known.street for known in before.addresses)]
    address.street, address.postcode = _numbered(rng.choice(unused), rng), _postcode(address.town, rng)
    goal = f'change the first line of your address in "{address.town}" to "{address.street}" and its postcode to '
    return Asked(goal + f'"{address.postcode}"', after)


def _review(before: State, after: State, rng: random.Random) -> Asked:
    review = rng.choice(before.products).title, rng.randrange(1, 6), rng.choice(_TITLES), rng.choice(_TEXTS)
    after.reviews.append(review)
    product, stars, title, text = review
    goal = f'review "{product}" with a score of "{stars}", the title "{title}" and the text "{text}"'
    return Asked(goal, after)


def _read_order(before: State, after: State, rng: random.Random) -> Asked:
    order = rng.choice(before.orders)
    title, count = rng.choice(order.lines)
    return Asked(f'answer with the quantity of "{title}" in your order "{order.number}"', after, answer=str(count))


_TASKS: dict[str, Callable[[State, State, random.Random], Asked]] = {
    "buy": _buy,
    "compare": _compare,
    "edit-cart": _edit_cart,
    "edit-address": _edit_address,
    "review": _review,
    "read-order": _read_order,
}

SHOP = SiteKind("shop/", __name__, "oscar", tuple(_TASKS))


def task_of(name: str, seed: int) -> tuple[State, Asked]:
    """The shop that an episode begins with, and what is asked of it: fixed by the task's name and seed."""
    rng = random.Random(f"{name}/{seed}")
    before = draw_state(rng)
    asked = _TASKS[name](before, deepcopy(before), rng)
    asked.goal = log_in(email_of(before.person), PEOPLE[before.person], asked.goal)
    return before, asked


def email_of(person: str) -> str:
    return f"{person}@shop.test"


# ------------------------------------------------------------------------------------- in the server process


class App:
    """See `site_server.App`."""

    def __init__(self, folder: Path, address: str) -> None:
        from webagent_core.tasks.shop_site import settings

        settings.set_up()
        from django.contrib.staticfiles.handlers import StaticFilesHandler
        from django.core.wsgi import get_wsgi_application

        from webagent_core.tasks.shop_site.fill import make_empty

        self.folder, self._empty = folder, folder / "empty.sqlite3"
        self._running: dict[str, Asked] = {}  # by episode
        self._django = StaticFilesHandler(get_wsgi_application())
        make_empty(self._empty, _SHELVES, _EACH)

    def begin(self, episode: str, task: str, seed: int) -> dict[str, Any]:
        from webagent_core.tasks.shop_site.fill import fill

        before, asked = task_of(task, seed)
        (self.folder / episode).mkdir()
        shutil.copy(self._empty, self._database(episode))
        fill(self._database(episode), before)
        self._running[episode] = asked
        return {"goal": asked.goal, "start": ""}

    def application(self, episode: str) -> Callable[..., Iterable[bytes]]:
        from webagent_core.tasks.shop_site.base import FILE

        if episode not in self._running:
            raise LookupError(episode)

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            FILE.set(self._database(episode))  # for this thread, which has this one request to serve
            return self._django(environ, start_response)

        return answer

    def judge(self, episode: str, answer: str | None) -> dict[str, Any]:
        asked = self._running[episode]
        wrong = differences(asked.state, read_facts(self._database(episode)))
        if asked.answer is not None and not same_answer(answer, asked.answer):
            wrong.append(f"the answer is {asked.answer!r}")
        return {"reward": 0.0 if wrong else 1.0, "detail": "; ".join(wrong[:3])}

    def end(self, episode: str) -> None:
        self._running.pop(episode, None)
        shutil.rmtree(self.folder / episode, ignore_errors=True)

    def _database(self, episode: str) -> Path:
        return self.folder / episode / "shop.sqlite3"


Fact = tuple[Any, ...]  # what it is about, whose, and the rest of it

_FACTS = (
    "select 'account', email from auth_user",
    """select case b.status when 'Open' then 'cart' else 'saved for later' end, u.email, p.title, l.quantity
       from basket_line l join basket_basket b on b.id = l.basket_id join catalogue_product p on p.id = l.product_id
       join auth_user u on u.id = b.owner_id where b.status in ('Open', 'Saved')""",
    """select 'order', u.email, s.line1, l.title, l.quantity from order_line l join order_order o on o.id = l.order_id
       left join auth_user u on u.id = o.user_id left join order_shippingaddress s on s.id = o.shipping_address_id""",
    """select 'address', u.email, a.line1, a.line4, a.postcode, a.line2 || a.line3 || a.state || a.notes
       from address_useraddress a join auth_user u on u.id = a.user_id""",
    """select 'review', u.email, p.title, r.score, r.title, r.body from reviews_productreview r
       left join auth_user u on u.id = r.user_id join catalogue_product p on p.id = r.product_id""",
)


def read_facts(database: Path) -> Counter[Fact]:
    """All that customers can change, as an episode's database has it."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return Counter(fact for query in _FACTS for fact in db.execute(query))


def facts_of(state: State) -> Counter[Fact]:
    email = email_of(state.person)
    return Counter(
        [
            *(("account", email_of(person)) for person in PEOPLE),
            *(("cart", email, title, count) for title, count in state.cart.items()),
            *(("order", email, order.street, *line) for order in state.orders for line in order.lines),
            *(("address", email, address.street, address.town, address.postcode, "") for address in state.addresses),
            *(("review", email, *review) for review in state.reviews),
        ]
    )


def differences(wanted: State, found: Counter[Fact]) -> list[str]:
    """How what was found is not the state that is wanted, in words; [] if it is."""
    expected = facts_of(wanted)
    missing = [f"{_words(fact)} is not there" for fact in (expected - found).elements()]
    return missing + [f"{_words(fact)} is one too many" for fact in (found - expected).elements()]


def _words(fact: Fact) -> str:
    return f"{fact[0]} {', '.join(str(part) for part in fact[1:] if part)}"
