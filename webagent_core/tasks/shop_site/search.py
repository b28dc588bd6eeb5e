"""A search engine for haystack, through which the shop lists what it has: it asks the episode's own database.

The simple engine that comes with haystack knows no categories, and the others keep an index beside the database.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from haystack.backends import BaseEngine, BaseSearchBackend, BaseSearchQuery, SearchNode
from haystack.models import SearchResult

# What the shop sorts by, in columns of a product's.
_COLUMNS = {"price": "stockrecords__price", "title_exact": "title", "rating": "rating", "date_created": "date_created"}


class _Backend(BaseSearchBackend):
    def search(
        self,
        query_string: SearchNode,
        sort_by: list[str] | None = None,
        start_offset: int = 0,
        end_offset: int | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        from oscar.core.loading import get_model

        products = get_model("catalogue", "Product").objects.browsable().base_queryset()
        for about, value in _conditions(query_string):
            if about == "category__in":
                products = products.filter(categories__in=value)
            elif about.startswith("content"):
                for word in str(value).split():
                    products = products.filter(title__icontains=word)
        order = [column.replace(column.lstrip("-"), _COLUMNS[column.lstrip("-")]) for column in sort_by or ()]
        products = products.order_by(*order, "id")
        found = [SearchResult("catalogue", "product", product.pk, 0) for product in products]
        for result, product in zip(found, products, strict=True):
            result.model, result.object = type(product), product
        return {"results": found[start_offset:end_offset], "hits": len(found)}


def _conditions(node: SearchNode) -> Iterator[tuple[str, Any]]:
    for child in node.children:
        yield from _conditions(child) if isinstance(child, SearchNode) else (child,)


class _Query(BaseSearchQuery):
    def build_query(self) -> SearchNode:
        return self.query_filter


class ShopEngine(BaseEngine):
    backend, query = _Backend, _Query
