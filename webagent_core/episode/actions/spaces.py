"""Coordinate spaces: from the numbers that a model writes to pixels of the screenshot, and on to the page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from webagent_core.episode.actions.action import Action

Size = tuple[int, int]  # width and height in pixels
Point = tuple[float, float]
SpaceKind = Literal["norm1000", "norm999", "norm1", "pixel", "resized_abs"]

_ENDS = {"norm1000": 1000.0, "norm999": 999.0, "norm1": 1.0}


@dataclass(frozen=True)
class CoordinateSpace:
    """What the numbers of a model mean. It is set once for a model and never guessed from the numbers.

    `norm1000`, `norm999` and `norm1` run from 0 to 1000, 999 or 1 over each side of the screenshot, ends included.
    `pixel` is pixels of the screenshot; `resized_abs` is pixels of what the image processor made of it (see
    `smart_resize`, whose settings the last three are), as Qwen2.5-VL counts.
    """

    kind: SpaceKind = "norm1000"
    factor: int = 28
    min_pixels: int = 3136
    max_pixels: int = 12_845_056

    def __post_init__(self) -> None:
        allowed = (*_ENDS, "pixel", "resized_abs")
        if self.kind not in allowed:
            raise ValueError(f"space = {self.kind!r} is not allowed: one of {', '.join(allowed)}")

    def limits(self, image: Size | None) -> Point:
        """The largest x and y: legal themselves in the `norm` spaces, one past the last pixel in the others.

        Raises:
            ValueError: the space counts pixels and there is no `image`.
        """
        if self.kind in _ENDS:
            return _ENDS[self.kind], _ENDS[self.kind]
        if image is None:
            raise ValueError(f"image = None is not allowed: {self.kind} coordinates need the size of the screenshot")
        return image if self.kind == "pixel" else smart_resize(image, self.factor, self.min_pixels, self.max_pixels)

    def holds(self, point: Point, image: Size | None) -> bool:
        """Whether the point lies in the screenshot."""
        pairs = zip(point, self.limits(image), strict=True)
        return all(0 <= value <= limit if self.kind in _ENDS else 0 <= value < limit for value, limit in pairs)

    def to_pixel(self, point: Point, image: Size) -> Point:
        """The pixel of the screenshot; the far end of a side is its last pixel.

        Raises:
            ValueError: the point lies outside. It is never moved to the border: that would hide a wrong space.
        """
        if not self.holds(point, image):
            limits = " and ".join(f"0..{limit:g}" for limit in self.limits(image))
            raise ValueError(f"point = {point} is out of range: {limits} ({self.kind})")
        sides = zip(point, self.limits(image), image, strict=True)
        x, y = (min(value / limit * side, side - 1) for value, limit, side in sides)
        return x, y

    def to_model(self, pixel: Point, image: Size) -> Point:
        """The inverse, to write a history or a demonstration in the model's numbers."""
        x, y = (value / side * limit for value, limit, side in zip(pixel, self.limits(image), image, strict=True))
        return x, y

    def on_page(self, action: Action, image: Size, viewport: Size) -> Action:
        """The action with its points in the page's CSS pixels; a scroll without a point is one in the middle.

        `image` is the size of the picture that the model was shown: the viewport's, or the same made smaller.

        Raises:
            ValueError: a point lies outside the picture, or the picture is not one of the viewport.
        """
        ratio = (image[0] / viewport[0], image[1] / viewport[1])
        if abs(ratio[0] / ratio[1] - 1) > 0.02:
            raise ValueError(f"image = {image} is not allowed: the viewport is {viewport}, of another shape")
        if action.name == "scroll" and action.x is None and action.element is None:
            return replace(action, x=viewport[0] / 2, y=viewport[1] / 2)
        points: dict[str, float] = {}
        for x, y in (("x", "y"), ("x2", "y2")):
            if getattr(action, x) is not None:
                pixel = self.to_pixel((getattr(action, x), getattr(action, y)), image)
                points[x], points[y] = pixel[0] / ratio[0], pixel[1] / ratio[1]
        return replace(action, **points)


def smart_resize(image: Size, factor: int = 28, min_pixels: int = 3136, max_pixels: int = 12_845_056) -> Size:
    """The size that the image processors of Qwen2-VL and its descendants resize to.

    Each side becomes the nearest multiple of `factor`. If that area is outside [min_pixels, max_pixels], both sides of
    the original are scaled to the nearer bound and rounded inwards.
    """
    width, height = image
    if min(width, height) < 1 or max(width, height) / min(width, height) > 200:
        raise ValueError(f"image = {image} is not allowed: both sides >= 1, neither more than 200 times the other")
    rounded = [round(side / factor) * factor for side in image]  # may be 0: that area is below any minimum
    area = math.prod(rounded)
    if area > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        rounded = [max(factor, math.floor(side / shrink / factor) * factor) for side in image]
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        rounded = [math.ceil(side * grow / factor) * factor for side in image]
    return rounded[0], rounded[1]


def to_css(
    pixel: Point,
    image: Size,
    *,
    viewport: Size | None = None,
    device_pixel_ratio: float = 1.0,
    scroll: Point = (0.0, 0.0),
    full_page: bool = False,
) -> Point:
    """From a pixel of a screenshot to the CSS pixels in which the mouse moves.

    Args:
        viewport: its size in CSS pixels; given, it is checked against the screenshot's.
        scroll: how far the page was scrolled; matters only where the screenshot shows the `full_page`.

    Raises:
        ValueError: screenshot and viewport differ in size, or the point is on a part of the page that is out of view.
    """
    x, y = pixel[0] / device_pixel_ratio, pixel[1] / device_pixel_ratio
    if full_page:
        x, y = x - scroll[0], y - scroll[1]
        if viewport and not (0 <= x < viewport[0] and 0 <= y < viewport[1]):
            raise ValueError(f"point = {(x, y)} is out of view: the viewport is {viewport}")
    elif viewport and any(abs(a / device_pixel_ratio - b) > 1 for a, b in zip(image, viewport, strict=True)):
        raise ValueError(
            f"image = {image} is not allowed: the viewport is {viewport} and the device pixel ratio"
            f" {device_pixel_ratio:g}"
        )
    return x, y
