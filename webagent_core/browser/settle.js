// Runs in the page. Resolves when the page has stopped changing: the document is interactive, nothing animates, and two
// frames plus `quiet` ms passed without a mutation; or when `limit` ms are over (false: it never came to rest).
({ quiet, limit }) => new Promise((resolve) => {
  const start = performance.now();
  let last = start;
  const observer = new MutationObserver(() => { last = performance.now(); });
  observer.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
  const busy = () =>
    document.readyState === "loading" ||
    (window.jQuery && window.jQuery.timers && window.jQuery.timers.length > 0) ||
    document.getAnimations().some((a) => a.playState === "running" && a.effect?.getComputedTiming().endTime !== Infinity);
  const done = (settled) => { observer.disconnect(); resolve(settled); };
  let frames = 0;
  const look = () => {
    const now = performance.now();
    if (now - start > limit) return done(false);
    if (busy()) { frames = 0; last = now; } else frames += 1;
    if (frames >= 2 && now - last >= quiet) return done(true);
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
