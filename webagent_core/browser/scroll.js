// Runs in the page. Scrolls by most of a screen: the element, or what around it scrolls; without an element the page, or,
// where that is as large as the window, what scrolls in the middle of it.
([element, right, down]) => {
  const page = document.scrollingElement ?? document.documentElement;
  const scrolls = (box) => {
    const style = getComputedStyle(box);
    if (box === box.ownerDocument.scrollingElement) return box.scrollHeight > box.clientHeight || box.scrollWidth > box.clientWidth;
    return right
      ? box.scrollWidth > box.clientWidth && /auto|scroll/.test(style.overflowX)
      : box.scrollHeight > box.clientHeight && /auto|scroll/.test(style.overflowY);
  };
  const from = element ?? (scrolls(page) ? page : document.elementFromPoint(innerWidth / 2, innerHeight / 2));
  let box = from;
  while (box && !(box.nodeType === 1 && scrolls(box))) box = box.parentNode ?? box.host;
  box ??= element ?? page;
  const size = box === page ? { clientWidth: innerWidth, clientHeight: innerHeight } : box;
  box.scrollBy({ left: right * size.clientWidth * 0.8, top: down * size.clientHeight * 0.8, behavior: "instant" });
}
