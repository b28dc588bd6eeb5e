"""Scripted demonstrators for the tasks of the shop (see shop.py): rules from (goal, page) to the next move."""

from __future__ import annotations

from decimal import Decimal

from webagent_core.tasks.moves import Element, Move, click, has, log_in, named, of_kind, quoted, select, stop, type_into


def _enter(goal: str, page: list[Element]) -> Move | None:
    """The next move to log in; None: it is done, or not on offer here."""
    if has(page, "Log In"):
        return log_in(goal, page, "Log In")
    if has(page, "Login or register"):
        return click(named(page, "Login or register", "link"))
    return None


def _says(page: list[Element], words: str) -> bool:
    return any(words in line for element in page for line in element.after)


def _below(page: list[Element], words: str) -> list[Element]:
    """The elements after the first that has this name, or after the first line with these words."""
    for place, element in enumerate(page):
        if element.name == words or any(words in line for line in element.after):
            return page[place + 1 :]
    raise LookupError(f"no {words!r} on the page")


def _go(page: list[Element], *names: str) -> Move:
    """Follow the first of these links that is there, else the one to the shop's first page, which always is."""
    return click(named(page, next((name for name in names if has(page, name)), "Shop")))


def _find(page: list[Element], product: str) -> Move:
    """The next move to a product's page: search for it."""
    if has(page, "Sort by") and has(page, product):
        return _go(page, product)
    boxes = [box for box in of_kind(page, "input text", "input search") if box.name == "Search"]
    if not boxes:
        return _go(page)
    return type_into(boxes[0], product) if boxes[0].value != product else click(named(page, "Search", "button"))


def _is_of(page: list[Element], product: str) -> bool:
    """Whether it is a product's page."""
    return has(page, "Add to cart") and not has(page, "Sort by") and _says(page, product)


def _fill(page: list[Element], texts: dict[str, str], button: str) -> Move:
    """Write into the fields of these names, send the form."""
    for name, text in texts.items():
        box = named(page, name, "input text", "textarea")
        if box.value != text:
            return type_into(box, text)
    return click(named(page, button, "button"))


def _amount(line: str) -> Decimal:
    return Decimal(line.rpartition("£")[2].replace(",", ""))


def _total(page: list[Element]) -> Decimal:
    """What the things in the cart cost; 0 where the page does not say."""
    lines = [line for element in page for line in element.after if line.startswith("Cart total: £")]
    return _amount(lines[0]) if lines else Decimal(0)


def _in_cart(page: list[Element]) -> dict[str, list[Element]]:
    """On the page of the cart: the elements of each line, by the product's name."""
    numbers = [place for place, element in enumerate(page) if element.kind == "input number"]
    return {page[place - 1].name: page[place : place + 4] for place in numbers}


def _set_quantity(line: list[Element], count: str) -> Move | None:
    """The next move to have so many of what is in a line of the cart; None: it is so."""
    number, update, _, later = line
    if number.value != count:
        return type_into(number, count)
    single, together = (_amount(text) for text in later.after[:2])  # not before it is sent the price changes
    return click(update) if together != single * int(count) else None


def _buy(goal: str, page: list[Element]) -> Move:
    product, town = quoted(goal)[2:]
    if move := _enter(goal, page):
        return move
    if _says(page, "Your order has been placed"):
        return stop()
    if has(page, "Ship to this address"):
        return click(named(_below(page, town), "Ship to this address"))
    if has(page, "Place order") or _says(page, "You pay"):
        return _go(page, "Place order", "Continue")
    lines = _in_cart(page)
    for name, line in lines.items():
        if name != product:
            return click(named(line, "Remove"))
        if move := _set_quantity(line, "1"):
            return move
    if lines:
        return _go(page, "Proceed to checkout")
    if _total(page):
        return _go(page, "View cart")
    return click(named(page, "Add to cart")) if _is_of(page, product) else _find(page, product)


def _compare(goal: str, page: list[Element]) -> Move:
    category = quoted(goal)[2]
    order = "Price low to high" if "cheapest" in goal else "Price high to low"
    if move := _enter(goal, page):
        return move
    for line in _in_cart(page).values():  # of an earlier slip
        return click(named(line, "Remove"))
    if not any(line == category for element in page for line in element.after):
        return _go(page, category, "Home")
    sorting = named(page, "Sort by", "select")
    if sorting.value != order:
        return select(sorting, order)
    first = page[page.index(sorting) + 1]
    if not _total(page):
        return click(named(page, "Add to cart"))
    return stop() if _total(page) == _amount(first.after[0]) else _go(page, "View cart")


def _edit_cart(goal: str, page: list[Element]) -> Move:
    changed, count, removed = quoted(goal)[2:]
    if move := _enter(goal, page):
        return move
    lines = _in_cart(page)
    if changed not in lines:
        return _go(page, "View cart")
    if move := _set_quantity(lines[changed], count):
        return move
    return click(named(lines[removed], "Remove")) if removed in lines else stop()


def _edit_address(goal: str, page: list[Element]) -> Move:
    town, street, postcode = quoted(goal)[2:]
    if move := _enter(goal, page):
        return move
    if has(page, "Add a new address"):
        done = _says(page, f"{street} {town} {postcode}")
        return stop() if done else click(named(_below(page, town), "Edit"))
    if has(page, "City") and named(page, "City").value == town:
        return _fill(page, {"First line of address": street, "Post/Zip-code": postcode}, "Save")
    return _go(page, "Address Book", "Account")


def _review(goal: str, page: list[Element]) -> Move:
    product, stars, title, text = quoted(goal)[2:]
    if move := _enter(goal, page):
        return move
    if not _is_of(page, product):
        return _find(page, product)
    if _says(page, text):
        return stop()
    if not has(page, "Save review"):
        return _go(page, "Write a review")
    score = of_kind(page, "select")[0]
    if score.value != stars:
        return select(score, stars)
    return _fill(page, {"Title": title, "Body": text}, "Save review")


def _read_order(goal: str, page: list[Element]) -> Move:
    title, number = quoted(goal)[2:]
    if move := _enter(goal, page):
        return move
    if not _says(page, f"Order #{number}"):
        return _go(page, number, "Order History", "Account")
    return stop([line for element in _below(page, title) for line in element.after if line.isdigit()][0])


SHOP_DEMONSTRATORS = {
    "shop/buy": _buy,
    "shop/compare": _compare,
    "shop/edit-cart": _edit_cart,
    "shop/edit-address": _edit_address,
    "shop/review": _review,
    "shop/read-order": _read_order,
}
