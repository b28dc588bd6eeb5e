"""Screenshots as parts of a chat message: data URLs, which every backend's chat template and image loader take.

A URL and not a decoded image, because each step's messages keep theirs: decoded, a batch of them takes gigabytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO

from PIL import Image

_PREFIX = "data:image/jpeg;base64,"


def picture_part(jpeg: bytes, max_pixels: int | None = None) -> dict:
    """The part of a message's content that shows this screenshot, made smaller if it has more than `max_pixels`."""
    return {"type": "image", "image": _data_url(jpeg, max_pixels)}


def shown_size(jpeg: bytes, max_pixels: int | None = None) -> tuple[int, int]:
    """Width and height of what `picture_part` shows."""
    with Image.open(BytesIO(jpeg)) as image:
        width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    ratio = math.sqrt(max_pixels / (width * height))
    return max(1, math.floor(width * ratio)), max(1, math.floor(height * ratio))


def pictures_of(messages: Iterable[dict]) -> list[Image.Image]:
    """The pictures of a chat in their order, decoded, for an image processor."""
    data = [url.removeprefix(_PREFIX) for url in picture_urls(messages)]
    return [Image.open(BytesIO(base64.b64decode(each))).convert("RGB") for each in data]


def picture_urls(messages: Iterable[dict]) -> list[str]:
    """The pictures of a chat in their order, as they stand in it."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


@lru_cache(maxsize=256)  # an episode shows the same screenshot at many steps
def _data_url(jpeg: bytes, max_pixels: int | None) -> str:
    size = shown_size(jpeg, max_pixels)
    with Image.open(BytesIO(jpeg)) as image:
        if size != image.size:
            smaller = BytesIO()
            image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(smaller, "JPEG", quality=90)
            jpeg = smaller.getvalue()
    return _PREFIX + base64.b64encode(jpeg).decode("ascii")
