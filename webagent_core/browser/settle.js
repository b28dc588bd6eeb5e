// Runs in the page. Resolves when the page has stopped changing: the document is interactive, nothing animates, what it
// put off for less than half a second has been done, and two frames plus `quiet` ms passed without a mutation; or when
// `limit` ms are over (false: it never came to rest). Looks into shadow roots and frames of the page's own origin too.
({ quiet, limit }) => new Promise((resolve) => {
  const { now, frame } = window.__webagent;
  const start = now();
  let last = start;
  const observer = new MutationObserver(() => { last = now(); });
  const everything = { subtree: true, childList: true, attributes: true, characterData: true };
  const windows = [];
  const watch = (view) => {
    let inner;
    try {
      inner = view.document;
      observer.observe(inner, everything);
    } catch { return; } // of another origin
    windows.push(view);
    for (const root of (view.__webagent?.roots ?? []).slice(-500)) if (root.deref()) observer.observe(root.deref(), everything);
    for (let i = 0; i < view.length && windows.length < 50; i++) watch(view[i]);
  };
  watch(window);
  // Only timers that what was done has set: one that sets itself again and again would never be done.
  const STARTS = 100, LATE = 250;
  const waits = (view, time) => {
    let waiting = false;
    for (const [id, { set, due }] of view.__webagent?.timers ?? []) {
      if (due + LATE < time) view.__webagent.timers.delete(id); // a text that was run, or a page that is too busy
      else if (set < start + STARTS) waiting = true;
    }
    return waiting;
  };
  const busy = (time) => windows.some((view) => {
    try {
      return (
        view.document.readyState === "loading" ||
        waits(view, time) ||
        (view.jQuery && view.jQuery.timers && view.jQuery.timers.length > 0) ||
        view.document.getAnimations().some((a) => a.playState === "running" && a.effect?.getComputedTiming().endTime !== Infinity)
      );
    } catch { return false; } // a frame that went elsewhere meanwhile
  });
  const done = (settled) => { observer.disconnect(); resolve(settled); };
  let frames = 0;
  const look = () => {
    const time = now();
    if (time - start > limit) return done(false);
    if (busy(time)) { frames = 0; last = time; } else frames += 1;
    if (frames >= 2 && time - last >= quiet) return done(true);
    frame(look);
  };
  frame(look);
})
