// Runs in the page. Where to press an element: a spot of it that is in the window and that nothing else covers, the
// middle if it can be, and if all of it is covered; null if there is no such element in the window.
(element) => {
  if (!element) return null;
  const box = element.getBoundingClientRect();
  const left = Math.max(box.left, 0), upper = Math.max(box.top, 0);
  const width = Math.min(box.right, innerWidth) - left, height = Math.min(box.bottom, innerHeight) - upper;
  if (width <= 0 || height <= 0) return null;
  const shares = [0.5, 0.25, 0.75, 0.1, 0.9];
  for (const down of shares)
    for (const right of shares) {
      const x = left + width * right, y = upper + height * down;
      if (element.contains(document.elementFromPoint(x, y))) return { x, y };
    }
  return { x: left + width / 2, y: upper + height / 2 };
}
