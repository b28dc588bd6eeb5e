// Runs in the page. Where to click an element as a person would: brings it into view, waits until it is visible, enabled
// and still, and returns a point of it that nothing covers, {x, y}; or {error} with what stood in the way to the last.
async ({ id, limit }) => {
  const element = window.__webagent?.elements.get(id)?.deref();
  if (!element?.isConnected) return { error: `there is no element ${id} on this page` };
  const end = performance.now() + limit;
  const frame = () => new Promise(requestAnimationFrame);
  const describe = (node) => node ? `<${node.tagName.toLowerCase()}> "${(node.textContent ?? "").trim().slice(0, 40)}"` : "nothing";
  // The middle first, then a grid: a neighbour may overlap the middle of something that is plainly there.
  const spots = [[0.5, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.5], [0.9, 0.5], [0.1, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.8]];
  const inside = (node) => {
    for (; node; node = node.parentNode ?? node.host) if (node === element || element.labels?.length && [...element.labels].includes(node)) return true;
    return false;
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
      for (const [right, down] of spots) {
        const x = box.x + box.width * right, y = box.y + box.height * down;
        let top = document.elementFromPoint(x, y);
        while (top?.shadowRoot?.elementFromPoint(x, y) && top.shadowRoot.elementFromPoint(x, y) !== top) top = top.shadowRoot.elementFromPoint(x, y);
        if (inside(top)) return { x, y };
        if (right === 0.5 && down === 0.5) error = `element ${id} is covered by ${describe(top)}`;
      }
    }
  } while (performance.now() < end);
  return { error };
}
