// Runs in the page. Returns the page as text, one element or one run of text a line:
//
//     <name> <id> <kind> [state]            e.g.   Submit 7 <button>      Username 3 <input text> = "ann"
//
// The id stands directly after the name: that is what a small policy can learn to copy, and it costs a large one nothing.
// An element keeps its id for as long as it lives in this document; ids count up from 1 in order of appearance.
// `limits` caps nodes, depth and characters here, inside the page, so that a hostile page cannot hand us megabytes.
({ skip, limits }) => {
  const memory = (window.__webagent ??= { ids: new WeakMap(), elements: new Map(), next: 1 });

  // One line is one element: words of the page must not be able to start a new one, nor to look like the <kind> of an
  // element, a chat turn or any other tag.
  const clean = (text, most = limits.name) => {
    const flat = text.replace(/[\s\u0000-\u001f\u007f-\u009f]+/g, " ").trim();
    const inert = flat.replace(/<(?=[|/\uff5c\p{L}])/gu, "< ").replaceAll('"', "'");
    return inert.length > most ? inert.slice(0, most) + "..." : inert;
  };
  memory.clean = clean;
  const idOf = (element) => {
    let id = memory.ids.get(element);
    if (id === undefined) {
      id = memory.next++;
      memory.ids.set(element, id);
      memory.elements.set(String(id), new WeakRef(element));
    }
    return id;
  };

  const nameOf = (element) => {
    const labelled = element.getAttribute("aria-labelledby");
    const parts = [
      element.getAttribute("aria-label"),
      labelled && labelled.split(/\s+/).map((id) => document.getElementById(id)?.textContent ?? "").join(" "),
      element.labels && [...element.labels].map((label) => label.textContent).join(" "),
      element.placeholder,
      element.tagName === "INPUT" && /^(button|submit|reset)$/.test(element.type) && element.value,
      !/^(SELECT|TEXTAREA|INPUT)$/.test(element.tagName) && element.textContent,
      besides(element),
      element.alt,
      element.title,
    ];
    for (const part of parts) {
      const name = part && clean(part);
      if (name) return name;
    }
    return "unnamed";
  };
  // A field without a label is known to people by the text right before it, or as the only child of a labelled row.
  const besides = (element) => {
    if (!/^(SELECT|TEXTAREA|INPUT)$/.test(element.tagName)) return null;
    const before = element.previousSibling;
    if (before && (before.nodeType === 3 || /^(LABEL|SPAN|B|STRONG)$/.test(before.nodeName))) return before.textContent;
    return null;
  };

  const kindOf = (element) => {
    const tag = element.tagName.toLowerCase();
    if (tag === "input") return /^(checkbox|radio)$/.test(element.type) ? element.type : "input " + element.type;
    if (tag === "a") return "link";
    const role = element.getAttribute("role");
    if (role && /^[a-z]+$/.test(role)) return role;
    return /^(button|select|textarea|option)$/.test(tag) ? tag : "clickable";
  };
  const stateOf = (element) => {
    let state = "";
    if (element.type === "checkbox" || element.type === "radio") state += element.checked ? " checked" : "";
    else if (element.tagName === "SELECT") {
      const options = [...element.options].slice(0, limits.options);
      state += ` = "${clean(element.selectedOptions[0]?.textContent ?? "")}"`;
      state += " of " + options.map((option) => `"${clean(option.textContent)}"`).join(" ");
      if (element.options.length > options.length) state += ` and ${element.options.length - options.length} more`;
    } else if (/^(INPUT|TEXTAREA)$/.test(element.tagName) && !/^(button|submit|reset|image)$/.test(element.type)) {
      if (element.value) state += ` = "${clean(element.value)}"`;
    }
    if (element.disabled) state += " disabled";
    if (element.getAttribute("aria-expanded") === "true") state += " expanded";
    if (element.getAttribute("aria-selected") === "true") state += " selected";
    return state;
  };

  const ROLES = /^(button|link|checkbox|radio|tab|menuitem|option|switch|combobox|textbox|searchbox|slider|spinbutton|treeitem)$/;
  const acts = (element, style, parentCursor) => {
    if (/^(BUTTON|SELECT|TEXTAREA|SUMMARY)$/.test(element.tagName)) return true;
    if (element.tagName === "INPUT") return element.type !== "hidden";
    if (element.tagName === "A") return element.hasAttribute("href");
    if (ROLES.test(element.getAttribute("role") ?? "")) return true;
    if (element.hasAttribute("onclick") || element.isContentEditable) return true;
    // Handlers are invisible from here; a hand cursor that begins at this element is how a page tells people.
    return style.cursor === "pointer" && parentCursor !== "pointer";
  };

  const lines = [];
  let run = "", characters = 0, nodes = 0, cut = false;
  const push = (line) => {
    if (characters + line.length > limits.characters) { cut = true; return; }
    characters += line.length + 1;
    lines.push(line);
  };
  const flush = () => {
    const text = clean(run, limits.text);
    run = "";
    if (text) push(text);
  };
  const walk = (node, depth, parentCursor) => {
    if (cut) return;
    if (++nodes > limits.nodes || depth > limits.depth) { cut = true; return; }
    if (node.nodeType === 3) { if (run.length < limits.text) run += node.data; return; }
    if (node.nodeType !== 1) return;
    if (/^(SCRIPT|STYLE|NOSCRIPT|TEMPLATE|HEAD|OPTION)$/.test(node.tagName)) return;
    if (skip && node.matches(skip)) return;
    const style = getComputedStyle(node);
    if (style.display === "none") return;
    const seen = style.visibility === "visible" && style.opacity !== "0";
    const box = node.getBoundingClientRect();
    if (seen && acts(node, style, parentCursor) && box.width > 0 && box.height > 0) {
      flush();
      push(`${nameOf(node)} ${idOf(node)} <${kindOf(node)}>${stateOf(node)}`);
      return;
    }
    // The words of a checkbox or a field are its name already.
    if (node.tagName === "LABEL" && node.control && !node.control.matches("select")) {
      if (node.contains(node.control)) walk(node.control, depth + 1, style.cursor);
      return;
    }
    const block = style.display !== "inline" && style.display !== "contents";
    if (block) flush();
    for (const child of (node.shadowRoot ?? node).childNodes) walk(child, depth + 1, style.cursor);
    if (block) flush();
    else run += " ";
  };
  walk(document.body ?? document.documentElement, 0, "auto");
  flush();
  if (cut) lines.push("[page cut here]");
  // Half a surrogate pair, which a page may hold, cannot be written to a file.
  const html = limits.html ? (document.documentElement?.outerHTML ?? "").slice(0, limits.html).toWellFormed() : "";
  return { text: lines.join("\n").toWellFormed(), title: clean(document.title).toWellFormed(), url: location.href, html };
}
