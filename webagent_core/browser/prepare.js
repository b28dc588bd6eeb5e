// Runs in every document before the page's own scripts. Keeps what could not be asked for later: closed shadow roots,
// timers that are about to go off, and the browser's own clock where a page may put another in its place.
(() => {
  if (window.__webagent) return;
  const kept = {
    ids: new WeakMap(), // of elements that observe.js has listed
    elements: new Map(), // and back
    next: 1,
    frames: [], // those of the last observation that cannot be looked into from here
    shadows: new WeakMap(), // roots by their hosts
    roots: [],
    timers: new Map(), // when each was set and is due, of those that are due soon
    now: ((clock, since) => () => since + clock())(performance.now.bind(performance), performance.timeOrigin), // ms
    frame: requestAnimationFrame.bind(window),
  };
  Object.defineProperty(window, "__webagent", { value: kept });

  const attachShadow = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    const root = attachShadow.call(this, options);
    kept.shadows.set(this, root);
    if (kept.roots.length > 1000) kept.roots = kept.roots.filter((each) => each.deref());
    kept.roots.push(new WeakRef(root));
    return root;
  };

  const LONGEST = 500, MOST = 1000; // ms; timers
  const { setTimeout, clearTimeout } = window;
  window.setTimeout = (handler, delay, ...rest) => {
    const run = function (...given) {
      kept.timers.delete(id);
      return handler.apply(this, given);
    };
    const id = setTimeout(typeof handler === "function" ? run : handler, delay, ...rest);
    const wait = Number(delay) || 0, set = kept.now();
    if (kept.timers.size >= MOST) for (const [old, { due }] of kept.timers) if (due < set) kept.timers.delete(old);
    if (wait <= LONGEST && kept.timers.size < MOST) kept.timers.set(id, { set, due: set + wait });
    return id;
  };
  window.clearTimeout = (id) => {
    kept.timers.delete(id);
    clearTimeout(id);
  };
})();
