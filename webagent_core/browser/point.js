// Runs in the page. Where to click an element as a person would: brings it into view, waits until it is visible, enabled
// and still, and returns a point of it that nothing covers, {x, y}; or {error} with what stood in the way to the last.
async ({ id, limit }) => {
  const element = window.__webagent?.elements.get(id)?.deref();
  if (!element?.isConnected) return { error: `there is no element ${id} on this page` };
  const end = performance.now() + limit;
  const frame = () => new Promise(requestAnimationFrame);
  const describe = (node) => `another one, ${node.tagName.toLowerCase()} "${(node.textContent ?? "").trim().slice(0, 40)}"`;
  // The middle first, then a grid: a neighbour may overlap the middle of something that is plainly there.
  const spots = [[0.5, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.5], [0.9, 0.5], [0.1, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.8]];
  const own = [element, ...(element.labels ?? [])];
  const inside = (node) => {
    for (; node; node = node.parentNode ?? node.host) if (own.includes(node)) return true;
    return false;
  };
  const topmost = (x, y) => {
    let top = document.elementFromPoint(x, y);
    for (let inner; (inner = top?.shadowRoot?.elementFromPoint(x, y)) && inner !== top; ) top = inner;
    return top;
  };
  let error = "";
  element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
  do {
    const before = element.getBoundingClientRect();
    await frame();
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!element.isConnected) return { error: `element ${id} left the page` };
    if (element.disabled) error = `element ${id} is disabled`;
    else if (!box.width || !box.height || style.visibility !== "visible") error = `element ${id} is not visible`;
    else if (box.x !== before.x || box.y !== before.y) error = `element ${id} is moving`;
    else {
      // Of an element larger than the window, the part that is in it.
      const left = Math.max(box.left, 0), upper = Math.max(box.top, 0);
      const width = Math.min(box.right, innerWidth) - left, height = Math.min(box.bottom, innerHeight) - upper;
      error = `element ${id} is outside the window`;
      for (const [right, down] of width > 0 && height > 0 ? spots : []) {
        const x = left + width * right, y = upper + height * down;
        const top = topmost(x, y);
        if (inside(top)) return { x, y };
        if (right === 0.5 && down === 0.5 && top) error = `element ${id} is covered by ${describe(top)}`;
      }
      // A bar that sticks to an edge of the window covers what was scrolled just into view.
      element.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
    }
  } while (performance.now() < end);
  return { error };
}
