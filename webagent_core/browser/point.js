// Runs in the page. Where to click an element as a person would: brings it into view, waits until it is visible, enabled
// and still, and returns a point of it that nothing covers, {x, y}; or {error} with what stood in the way to the last.
// The element may be in a shadow root, or in a frame of the page's own origin: the point is one of this window.
async ({ id, name, limit }) => {
  const memory = window.__webagent;
  const element = memory?.elements.get(id)?.deref();
  const isHere = () => element?.isConnected && element.ownerDocument.defaultView;
  if (!isHere()) return { error: element ? `element ${name} is no longer on this page` : `there is no element ${name} on this page` };
  const { now, frame } = memory;
  const start = now(), end = start + limit;
  const describe = (node) => `another one, ${node.tagName.toLowerCase()} "${(node.textContent ?? "").trim().slice(0, 40)}"`;
  // The middle first, then a grid: a neighbour may overlap the middle of something that is plainly there.
  const spots = [[0.5, 0.5], [0.5, 0.2], [0.5, 0.8], [0.1, 0.5], [0.9, 0.5], [0.1, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.8]];
  const labels = [...(/^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName) ? element.labels ?? [] : [])];
  const own = [element, ...labels];
  const shadowOf = (node) => node.shadowRoot ?? node.ownerDocument?.defaultView?.__webagent?.shadows.get(node);

  // Where a frame shows its document: the place and size of that in the window of the frame's own document.
  const placeOf = (its) => {
    const box = its.getBoundingClientRect(), style = getComputedStyle(its);
    const scale = [box.width / (its.offsetWidth || box.width), box.height / (its.offsetHeight || box.height)];
    const edge = [its.clientLeft + parseFloat(style.paddingLeft), its.clientTop + parseFloat(style.paddingTop)];
    return { x: box.left + edge[0] * scale[0], y: box.top + edge[1] * scale[1], scale };
  };
  // The part of a box that its own window shows, and of that what the window of the frame shows, and so on up to here.
  const shownPart = (box, view) => {
    let [left, upper, right, lower] = [box.left, box.top, box.right, box.bottom];
    for (;;) {
      [left, upper] = [Math.max(left, 0), Math.max(upper, 0)];
      [right, lower] = [Math.min(right, view.innerWidth), Math.min(lower, view.innerHeight)];
      if (view === window) return { left, upper, width: right - left, height: lower - upper };
      const { x, y, scale } = placeOf(view.frameElement);
      [left, upper, right, lower] = [x + left * scale[0], y + upper * scale[1], x + right * scale[0], y + lower * scale[1]];
      view = view.frameElement.ownerDocument.defaultView;
    }
  };
  const topmost = (x, y) => {
    let root = document, top = null;
    for (;;) {
      const hit = Document.prototype.elementFromPoint.call(root, x, y);
      if (!hit) return top;
      top = hit;
      for (let shadow; (shadow = shadowOf(top)); ) {
        const inner = shadow.elementFromPoint(x, y);
        if (!inner || inner === top) break;
        top = inner;
      }
      if (top.tagName !== "IFRAME" && top.tagName !== "FRAME") return top;
      const inner = top.contentDocument;
      if (!inner) return top;
      const place = placeOf(top);
      [x, y] = [(x - place.x) / place.scale[0], (y - place.y) / place.scale[1]];
      root = inner;
    }
  };
  const inside = (node) => {
    for (; node; node = node.parentNode ?? node.host) if (own.includes(node)) return true;
    return false;
  };
  // What is clicked: the element, or the label that is shown in its place.
  const target = () => {
    for (const each of own) {
      const style = getComputedStyle(each), box = memory.boxOf(each);
      if (box && style.visibility === "visible" && (each !== element || !labels.length || style.opacity !== "0")) return { each, box };
    }
    return null;
  };
  const view = element.ownerDocument.defaultView;
  const bring = (block) => (target()?.each ?? element).scrollIntoView({ block, inline: block, behavior: "instant" });
  const measure = () => {
    const found = target();
    return found && { ...shownPart(found.box, view), box: found.box };
  };
  const distance = (a, b) =>
    Math.max(...[a.left - b.left, a.upper - b.upper, a.box.left - b.box.left, a.box.top - b.box.top].map(Math.abs));
  let error = "";
  bring("nearest");
  let last = measure();
  do {
    await new Promise(frame);
    if (!isHere()) return { error: `element ${name} left the page` };
    const part = measure(), away = part && last ? distance(part, last) : Infinity;
    last = part;
    // What never comes to rest can be hit all the same while it is slow for its size.
    const slow = part && away * 8 < Math.min(part.width, part.height) && now() - start > limit / 3;
    if (element.matches(":disabled")) error = `element ${name} is disabled`;
    else if (!part) error = `element ${name} is not visible`;
    else if (away > 0 && !slow) error = `element ${name} is moving`;
    else {
      error = `element ${name} is outside the window`;
      for (const [right, down] of part.width > 0 && part.height > 0 ? spots : []) {
        const x = part.left + part.width * right, y = part.upper + part.height * down;
        const top = topmost(x, y);
        if (inside(top)) return { x, y };
        if (right === 0.5 && down === 0.5 && top) error = `element ${name} is covered by ${describe(top)}`;
      }
      // A bar that sticks to an edge of the window covers what was scrolled just into view.
      bring("center");
      last = measure();
    }
  } while (now() < end);
  return { error };
}
