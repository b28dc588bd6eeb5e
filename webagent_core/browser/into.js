// Runs in the page, on the element of a frame from elsewhere: the point of this window where the frame shows its point
// {x, y}; or {error} if something covers it. See point.js.
(element, { x, y }) => {
  const place = () => {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    const scale = [box.width / (element.offsetWidth || box.width), box.height / (element.offsetHeight || box.height)];
    return {
      x: box.left + (element.clientLeft + parseFloat(style.paddingLeft) + x) * scale[0],
      y: box.top + (element.clientTop + parseFloat(style.paddingTop) + y) * scale[1],
    };
  };
  const view = element.ownerDocument.defaultView;
  const outside = (at) => at.x < 0 || at.y < 0 || at.x >= view.innerWidth || at.y >= view.innerHeight;
  if (outside(place())) element.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
  const at = place();
  if (outside(at)) return { error: "its frame is outside the window" };
  let top = element.ownerDocument.elementFromPoint(at.x, at.y);
  for (let shadow; (shadow = top && (top.shadowRoot ?? view.__webagent?.shadows.get(top))); ) {
    const inner = shadow.elementFromPoint(at.x, at.y);
    if (!inner || inner === top) break;
    top = inner;
  }
  if (top !== element) return { error: `its frame is covered by another element, ${top?.tagName.toLowerCase()}` };
  return at;
}
