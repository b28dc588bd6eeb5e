"""What the shop's database holds, written through Django's models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from webagent_core.tasks.shop_site.base import FILE
from webagent_core.tasks.site import PEOPLE

if TYPE_CHECKING:
    from webagent_core.tasks.shop import Order, State

_CURRENCY = "GBP"
_OPENED = datetime(2025, 3, 4, 12, tzinfo=UTC)  # no page that an episode begins with may show the clock


def make_empty(file: Path, categories: int, each: int) -> None:
    """A database with its tables, its people, and so many categories, of so many products each, still without names."""
    from django.contrib.auth import get_user_model
    from django.core.management import call_command

    with _writing_to(file):
        call_command("migrate", run_syncdb=True, verbosity=0, interactive=False)
        _create("address", "Country", iso_3166_1_a2="GB", printable_name="United Kingdom", is_shipping_country=True)
        for name, secret in PEOPLE.items():
            about = {"first_name": name.title(), "date_joined": _OPENED}
            get_user_model().objects.create_user(name, f"{name}@shop.test", secret, **about)
        partner = _create("partner", "Partner", name="Store")
        kind = _create("catalogue", "ProductClass", name="Thing")
        for number in range(categories):
            category = _model("catalogue", "Category").add_root(name=f"Category {number}")
            for _ in range(each):
                product = _create("catalogue", "Product", title="Nothing", product_class=kind)
                _create("catalogue", "ProductCategory", product=product, category=category)
                _create("partner", "StockRecord", product=product, partner=partner, partner_sku=str(product.pk))


def fill(file: Path, state: State) -> None:
    """Bring a copy of the empty database to the state that an episode begins with."""
    from django.contrib.auth import get_user_model
    from django.db import transaction

    with _writing_to(file), transaction.atomic():
        person = get_user_model().objects.get(username=state.person)
        places = _places(state)
        stock = _stock(state)
        for place in places.values():
            _create("address", "UserAddress", user=person, **place)
        for number, order in enumerate(state.orders):
            _order(order, person, places[order.street], _OPENED + timedelta(days=9 * number), stock)
        if state.cart:
            _cart(state.cart, person, stock)


@contextmanager
def _writing_to(file: Path) -> Iterator[None]:
    from django.db import connection

    FILE.set(file)
    try:
        yield
    finally:
        connection.close()  # a thread keeps it otherwise, and goes on with this file


def _model(app: str, name: str) -> Any:
    from oscar.core.loading import get_model

    return get_model(app, name)


def _create(app: str, model: str, **fields: Any) -> Any:
    return _model(app, model).objects.create(**fields)


def _places(state: State) -> dict[str, dict[str, Any]]:
    """The customer's addresses in the fields of Django's models, by street."""
    always = {
        "first_name": state.person.title(),
        "last_name": "Stone",
        "country": _model("address", "Country").objects.get(),
    }
    return {
        address.street: always | {"line1": address.street, "line4": address.town, "postcode": address.postcode}
        for address in state.addresses
    }


def _stock(state: State) -> dict[str, Any]:
    """Name the categories and products, and say what they cost: the stock records, by title."""
    from django.utils.text import slugify

    for category, name in zip(_model("catalogue", "Category").objects.order_by("path"), state.categories, strict=True):
        category.name, category.slug = name, slugify(name)
        category.save()
    records = _model("partner", "StockRecord").objects.order_by("id")
    for record, product in zip(records, state.products, strict=True):
        record.price, record.num_in_stock, record.price_currency = Decimal(product.price), product.stock, _CURRENCY
        record.save()
        record.product.title, record.product.slug = product.title, slugify(product.title)
        record.product.save()
    return {record.product.title: record for record in records}


def _order(order: Order, person: Any, place: dict[str, Any], date: datetime, stock: dict[str, Any]) -> None:
    total = sum(stock[title].price * count for title, count in order.lines)
    placed = _create(
        "order", "Order", number=order.number, user=person, currency=_CURRENCY, total_incl_tax=total,
        total_excl_tax=total, shipping_address=_create("order", "ShippingAddress", **place), date_placed=date,
    )  # fmt: skip
    for title, count in order.lines:
        record = stock[title]
        prices = {
            f"line_price{when}_{tax}_tax": record.price * count
            for when in ("", "_before_discounts")
            for tax in ("incl", "excl")
        }
        _create(
            "order", "Line", order=placed, partner=record.partner, partner_name=record.partner.name,
            partner_sku=record.partner_sku, stockrecord=record, product=record.product, title=title, quantity=count,
            num_allocated=0, unit_price_incl_tax=record.price, unit_price_excl_tax=record.price, **prices,
        )  # fmt: skip


def _cart(cart: dict[str, int], person: Any, stock: dict[str, Any]) -> None:
    basket = _create("basket", "Basket", owner=person)
    for title, count in cart.items():
        record = stock[title]
        _create(
            "basket", "Line", basket=basket, line_reference=f"{record.product_id}_{record.pk}", quantity=count,
            product=record.product, stockrecord=record, price_currency=_CURRENCY, price_excl_tax=record.price,
            price_incl_tax=record.price,
        )  # fmt: skip
