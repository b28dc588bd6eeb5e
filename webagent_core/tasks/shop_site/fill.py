"""What the shop's database holds, written through Django's models."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from webagent_core.tasks.shop_site.base import FILE
from webagent_core.tasks.site import PEOPLE

if TYPE_CHECKING:
    from webagent_core.tasks.shop import State

_CURRENCY = "GBP"
_OPENED = datetime(2025, 3, 4, 12, tzinfo=UTC)  # no page that an episode begins with may show the clock


def make_empty(file: Path, categories: int, each: int) -> None:
    """A database with its tables, its people, and so many categories, of so many products each, still without names."""
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from django.db import connection
    from oscar.core.loading import get_model

    FILE.set(file)
    call_command("migrate", run_syncdb=True, verbosity=0, interactive=False)
    _create("address", "Country", iso_3166_1_a2="GB", printable_name="United Kingdom", is_shipping_country=True)
    for name, secret in PEOPLE.items():
        get_user_model().objects.create_user(
            name, f"{name}@shop.test", secret, first_name=name.title(), date_joined=_OPENED
        )
    partner = _create("partner", "Partner", name="Store")
    kind = _create("catalogue", "ProductClass", name="Thing")
    for number in range(categories):
        shelf = get_model("catalogue", "Category").add_root(name=f"Category {number}")
        for _ in range(each):
            product = _create("catalogue", "Product", title="Nothing", product_class=kind)
            _create("catalogue", "ProductCategory", product=product, category=shelf)
            _create("partner", "StockRecord", product=product, partner=partner, partner_sku=str(product.pk))
    connection.close()


def fill(file: Path, state: State) -> None:
    """Bring a copy of the empty database to the state that an episode begins with."""
    from django.contrib.auth import get_user_model
    from django.db import connection, transaction
    from django.utils.text import slugify
    from oscar.core.loading import get_model

    FILE.set(file)
    with transaction.atomic():
        person = get_user_model().objects.get(username=state.person)
        shelves = get_model("catalogue", "Category").objects.order_by("path")
        for shelf, category in zip(shelves, state.categories, strict=True):
            shelf.name, shelf.slug = category, slugify(category)
            shelf.save()
        stock = {}
        records = get_model("partner", "StockRecord").objects.order_by("id")
        for record, product in zip(records, state.products, strict=True):
            record.price, record.num_in_stock, record.price_currency = Decimal(product.price), product.stock, _CURRENCY
            record.save()
            record.product.title, record.product.slug = product.title, slugify(product.title)
            record.product.save()
            stock[product.title] = record
        country = get_model("address", "Country").objects.get()
        for address in state.addresses:
            at = _place(state, address.street, country)
            _create("address", "UserAddress", user=person, **at)
        for number, order in enumerate(state.orders):
            total = sum(stock[title].price * count for title, count in order.lines)
            placed = _create(
                "order", "Order", number=order.number, user=person, currency=_CURRENCY, total_incl_tax=total,
                total_excl_tax=total, shipping_address=_create(
                    "order", "ShippingAddress", **_place(state, order.street, country)
                ), date_placed=_OPENED + timedelta(days=9 * number),
            )  # fmt: skip
            for title, count in order.lines:
                _order_line(placed, stock[title], count)
        if state.cart:
            basket = _create("basket", "Basket", owner=person)
            for title, count in state.cart.items():
                price = stock[title].price
                _create(
                    "basket", "Line", basket=basket, line_reference=f"{stock[title].product_id}_{stock[title].pk}",
                    product=stock[title].product, stockrecord=stock[title], quantity=count, price_currency=_CURRENCY,
                    price_excl_tax=price, price_incl_tax=price,
                )  # fmt: skip
    connection.close()


def _create(app: str, model: str, **fields: Any) -> Any:
    from oscar.core.loading import get_model

    return get_model(app, model).objects.create(**fields)


def _place(state: State, street: str, country: Any) -> dict[str, Any]:
    address = next(address for address in state.addresses if address.street == street)
    name = {"first_name": state.person.title(), "last_name": "Stone"}
    return name | {"line1": street, "line4": address.town, "postcode": address.postcode, "country": country}


def _order_line(order: Any, record: Any, count: int) -> None:
    prices = {
        f"line_price{when}_{tax}_tax": record.price * count
        for when in ("", "_before_discounts")
        for tax in ("incl", "excl")
    }
    _create(
        "order", "Line", order=order, partner=record.partner, partner_name=record.partner.name,
        partner_sku=record.partner_sku, stockrecord=record, product=record.product, title=record.product.title,
        quantity=count, num_allocated=0, unit_price_incl_tax=record.price, unit_price_excl_tax=record.price, **prices,
    )  # fmt: skip
