"use strict";
// Everything that comes from the run reaches the document through textContent, or as a data: picture made by the report.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const list = document.getElementById("list");
  if (!list) return;
  const detail = document.getElementById("detail");
  const filters = document.getElementById("filters");
  const byId = new Map(data.trajectories.map((t) => [t.id, t]));
  const SIGN = { success: "✓", failure: "✗", invalid: "∅" };
  const FACETS = ["phase", "update", "task", "outcome", "exit_status"];
  let current = null; // the trajectory shown
  let at = 0; // its step

  function element(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined && text !== null) node.textContent = String(text);
    return node;
  }
  const one = (value) => (typeof value === "number" ? String(Number(value.toFixed(3))) : (value ?? "none"));
  // Several numbers are one for each step.
  const figure = (value) => (Array.isArray(value) ? value.map(one).join(", ") : one(value));
  const when = (t) =>
    t.phase === "train" ? `update ${t.update}` : t.phase === "during" ? `evaluation ${t.update}` : `${t.phase} training`;

  // ---- list

  for (const facet of FACETS) {
    const select = filters.elements[facet];
    const counts = new Map();
    for (const t of data.trajectories) counts.set(String(t[facet]), (counts.get(String(t[facet])) ?? 0) + 1);
    const values = [...counts.keys()];
    if (facet === "update") values.sort((a, b) => a - b);
    else if (facet !== "phase") values.sort();
    select.append(new Option(`all (${data.trajectories.length})`, ""));
    for (const value of values) select.append(new Option(`${value} (${counts.get(value)})`, value));
  }

  function matching() {
    const words = filters.elements.words.value.trim().toLowerCase();
    return data.trajectories.filter(
      (t) =>
        FACETS.every((facet) => filters.elements[facet].value === "" || filters.elements[facet].value === String(t[facet])) &&
        (words === "" || `${t.group}\n${t.goal}`.toLowerCase().includes(words)),
    );
  }

  function showList() {
    const found = matching();
    list.replaceChildren(
      ...found.map((t) => {
        const item = element("li");
        const button = element("button");
        button.type = "button";
        button.dataset.id = t.id;
        const row = element("span", "row");
        const sign = element("span", `outcome ${t.outcome}`, SIGN[t.outcome]);
        sign.title = t.outcome;
        row.append(sign, element("span", "name", t.task), element("span", "when", when(t)));
        const below = element("span", "row");
        below.append(element("span", "goal", t.goal), element("span", "when", t.exit_status ?? "running"));
        button.append(row, below);
        button.addEventListener("click", () => show(t.id));
        item.append(button);
        return item;
      }),
    );
    document.getElementById("count").textContent = `${found.length} of ${data.trajectories.length} listed`;
    mark();
  }

  function mark() {
    for (const button of list.querySelectorAll("button")) {
      button.setAttribute("aria-current", String(current !== null && Number(button.dataset.id) === current.id));
    }
  }

  // ---- one trajectory

  function fact(name, value, className, title) {
    const pair = element("div");
    const said = element("dd");
    said.append(element("b", className, value));
    if (title) said.title = title;
    pair.append(element("dt", "", name), said);
    return pair;
  }

  function siblings(t) {
    const line = element("div", "siblings");
    line.append(element("span", "", `Group ${t.group}:`));
    for (const member of data.groups[t.siblings]) {
      const label = `${SIGN[member.outcome]} ${figure(member.reward)}`;
      const here = member.id === t.id;
      const node = element(member.embedded && !here ? "button" : "span", `member ${here ? "here" : member.embedded ? "" : "away"}`, label);
      node.title = `reward ${figure(member.reward)}, ${member.exit_status ?? "running"}${member.embedded ? "" : ", not in this page"}`;
      if (member.embedded && !here) {
        node.type = "button";
        node.addEventListener("click", () => show(member.id));
      }
      line.append(node);
    }
    return line;
  }

  function picture(step, empty) {
    if (step.screenshot === null) return element("div", "no-picture", empty);
    const image = element("img");
    image.src = data.pictures[step.screenshot];
    image.alt = "Screenshot of the page before the action";
    return image;
  }

  function film(t) {
    const strip = element("div", "film");
    t.steps.forEach((step, index) => {
      const button = element("button");
      button.type = "button";
      button.title = step.action ?? step.error ?? "no action";
      button.append(picture(step, ""), element("span", "caption", `${index + 1}  ${step.action ?? "no action"}`));
      button.addEventListener("click", () => showStep(index));
      strip.append(button);
    });
    return strip;
  }

  function show(id, step = 0) {
    const t = byId.get(id);
    if (!t) return;
    current = t;
    const facts = element("dl", "facts");
    facts.append(
      fact("outcome", `${SIGN[t.outcome]} ${t.outcome}`, t.outcome),
      fact("reward", figure(t.reward)),
      fact("advantage", figure(t.advantage)),
      fact("exit status", t.exit_status ?? "running", "", data.meanings[t.exit_status]),
      fact("task", t.task),
      fact("seed", t.seed),
      fact("when", when(t)),
      fact("took", `${figure(t.seconds)} s`),
    );
    const parts = [element("h3", "", t.goal || "(no goal)"), facts, siblings(t)];
    if (t.answer !== null) parts.push(element("p", "say", `Answer: ${t.answer}`));
    if (t.detail) parts.push(element("p", "say", `Detail: ${t.detail}`));
    if (t.evidence.length) {
      const found = element("details");
      found.append(element("summary", "", `What the reward rests on: ${t.evidence.length}`));
      for (const [title, text] of t.evidence) found.append(block(title, "evidence", text));
      parts.push(found);
    }
    parts.push(film(t), element("div", "step"));
    detail.replaceChildren(...parts);
    detail.scrollTop = 0;
    mark();
    showStep(Math.min(step, t.steps.length - 1));
  }

  // ---- one step

  function block(title, className, text) {
    const part = element("div");
    part.append(element("h4", "", title), element("pre", className, text));
    return part;
  }

  function showStep(index) {
    const place = detail.querySelector(".step");
    const step = current.steps[index];
    if (!step) {
      place.replaceChildren(element("p", "note", "The episode ended before its first step."));
      return;
    }
    at = index;
    const said = element("div");
    if (step.action !== null) said.append(block("Action", "action", step.action));
    if (step.error !== null) {
      said.append(block(step.action === null ? "Format error: no action in the response" : "The page's answer", "error", step.error));
    } else if (step.action === null) {
      said.append(block("Action", "error", "none"));
    }
    said.append(block(`Response (${step.response_tokens} tokens)`, "response", step.response || "(empty)"));
    const prompt = element("details");
    prompt.open = remembered.prompt;
    prompt.addEventListener("toggle", () => (remembered.prompt = prompt.open));
    const count = step.messages.length;
    prompt.append(element("summary", "", `Prompt: ${count} message${count === 1 ? "" : "s"}, ${step.prompt_tokens} tokens`));
    for (const [role, text] of step.messages) {
      const message = element("div", "message");
      message.append(element("h4", "", role), element("pre", "", data.texts[text]));
      prompt.append(message);
    }
    said.append(prompt);
    if (step.cut !== null) said.append(element("p", "say", `Cut from the prompt to make it fit: ${step.cut}`));
    if (step.observation !== null) {
      const seen = element("details");
      seen.append(element("summary", "", "Observation"), element("pre", "", data.texts[step.observation]));
      said.append(seen);
    }
    const page = element("div", "picture");
    const image = picture(step, "no screenshot");
    // Small pages (MiniWoB's 160 x 210) are doubled.
    image.addEventListener("load", () => (image.width = image.naturalWidth * (image.naturalWidth < 400 ? 2 : 1)));
    image.addEventListener("click", () => place.classList.toggle("large"));
    page.append(image);
    const url = element("p", "url", `Step ${index + 1} of ${current.steps.length} · ${step.url}`);
    place.replaceChildren(url, page, said);
    const strip = detail.querySelector(".film");
    [...strip.children].forEach((button, other) => button.setAttribute("aria-current", String(other === index)));
    const button = strip.children[index];
    strip.scrollLeft = button.offsetLeft - (strip.clientWidth - button.offsetWidth) / 2;
    history.replaceState(null, "", `#t${current.id}s${index + 1}`);
  }
  const remembered = { prompt: false }; // whether the prompt stays open from step to step

  // ---- keys, filters, links

  function neighbour(by) {
    const buttons = [...list.querySelectorAll("button")];
    const here = buttons.findIndex((button) => current !== null && Number(button.dataset.id) === current.id);
    const next = buttons[Math.max(0, Math.min(buttons.length - 1, here + by))];
    if (!next) return;
    show(Number(next.dataset.id));
    next.scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select")) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in steps && current !== null) {
      event.preventDefault();
      showStep(Math.max(0, Math.min(current.steps.length - 1, at + steps[event.key])));
    }
    if (event.key === "j") neighbour(1);
    if (event.key === "k") neighbour(-1);
  });
  filters.addEventListener("input", showList);
  filters.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("clear").addEventListener("click", () => {
    filters.reset();
    showList();
  });
  showList();

  const linked = /^#t(\d+)s(\d+)$/.exec(location.hash);
  if (linked && byId.has(Number(linked[1]))) {
    show(Number(linked[1]), Number(linked[2]) - 1);
    document.getElementById("trajectories").scrollIntoView();
  }
})();
