// Runs in the page. Returns the page as text, one element or one run of text a line:
//
//     <name> <id> <kind> [state]            e.g.   Submit 7 <button>      Username 3 <input text> = "ann"
//
// The id stands directly after the name: that is what a small policy can learn to copy, and it costs a large one nothing.
// An element keeps its id for as long as it lives in this document; ids count up from 1 in order of appearance. Shadow
// roots, closed ones too, and frames of the page's own origin are part of the page. Of a frame from elsewhere the text has
// the mark \u0001<n>\u0001 and `__webagent.frames` its element: page.py reads it where it is.
// `limits` caps nodes, depth and characters here, inside the page, so that a hostile page cannot hand us megabytes.
({ skip, limits, prefix }) => {
  const memory = window.__webagent;
  memory.frames = [];

  // A form's own fields, and a document's named elements, take the place of properties: <input name="childNodes"> in a
  // form is what form.childNodes gives. The getters of the prototypes are not fooled.
  const getter = (type, name) => {
    const { get } = Object.getOwnPropertyDescriptor(type.prototype, name);
    return (node) => get.call(node);
  };
  const method = (type, name) => (node, ...rest) => type.prototype[name].call(node, ...rest);
  const typeOf = getter(Node, "nodeType"), childrenOf = getter(Node, "childNodes"), before = getter(Node, "previousSibling");
  const ownText = getter(Node, "textContent"), isEditable = getter(HTMLElement, "isContentEditable");
  const upper = getter(Element, "tagName"), openShadow = getter(Element, "shadowRoot");
  const matches = method(Element, "matches"), find = method(Element, "querySelector");
  const attribute = method(Element, "getAttribute"), has = method(Element, "hasAttribute");
  const rectangle = method(Element, "getBoundingClientRect"), rootOf = method(Node, "getRootNode");
  const tagOf = (element) => upper(element).toUpperCase(); // XHTML and SVG have small letters
  const shadowOf = (element) => openShadow(element) ?? memory.shadows.get(element) ?? view.__webagent?.shadows.get(element);
  const editable = (element) => element.namespaceURI === "http://www.w3.org/1999/xhtml" && isEditable(element);
  const FIELD = /^(SELECT|TEXTAREA|INPUT)$/;

  // One line is one element: words of the page must not be able to start a new one, nor to look like the <kind> of an
  // element, a chat turn or any other tag. What no reader of the page sees (zero-width characters, marks of direction,
  // characters that stand for others as tags) is no part of its words.
  const UNSEEN = /[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
  const clean = (text, most = limits.name) => {
    const short = text.slice(0, 20 * most).replace(UNSEEN, "");
    const flat = short.replace(/[\s\u0000-\u001f\u007f-\u009f]+/g, " ").trim();
    const inert = flat.replace(/<(?=[|/\uff5c\p{L}])/gu, "< ").replaceAll('"', "'");
    return inert.length > most ? inert.slice(0, most) + "..." : inert;
  };
  memory.clean = clean;

  // The box of an element, or of what it holds where it has none itself and lets that stick out.
  const boxOf = (element) => {
    const box = rectangle(element);
    if (box.width > 0 && box.height > 0) return box;
    const style = getComputedStyle(element);
    if (style.display !== "contents" && (style.display === "none" || style.overflow !== "visible")) return null;
    for (const inner of [...method(Element, "querySelectorAll")(element, "*")].slice(0, 20)) {
      const its = rectangle(inner);
      if (its.width > 0 && its.height > 0 && getComputedStyle(inner).visibility === "visible") return its;
    }
    return null;
  };
  memory.boxOf = boxOf;
  const isSeen = (style) => style.visibility === "visible" && style.opacity !== "0";
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
    const tag = tagOf(element), field = FIELD.test(tag), root = rootOf(element);
    const labelled = attribute(element, "aria-labelledby");
    const shadow = shadowOf(element);
    const picture = () => find(element, "img[alt]:not([alt='']), svg[aria-label], [title]:not([title=''])");
    const parts = [
      () => attribute(element, "aria-label"),
      () => labelled && labelled.split(/\s+/).map((id) => root.getElementById?.(id)?.textContent ?? "").join(" "),
      () => (field || tag === "BUTTON") && [...(element.labels ?? [])].map(wordsOf).join(" "),
      () => attribute(element, "placeholder"),
      () => tag === "INPUT" && /^(button|submit|reset)$/.test(element.type) && element.value,
      () => !field && !editable(element) && ownText(element),
      () => shadow && [...shadow.childNodes].map((node) => (node.nodeName === "STYLE" ? "" : node.textContent)).join(" "),
      () => field && besides(element),
      () => attribute(element, "alt"),
      () => attribute(element, "title"),
      () => ((inner) => inner && (attribute(inner, "alt") || attribute(inner, "aria-label") || attribute(inner, "title")))(picture()),
    ];
    for (const part of parts) {
      const text = part(), name = text && clean(text);
      if (name) return name;
    }
    return "unnamed";
  };
  // A field without a label is known to people by the text right before it, or as the only child of a labelled row.
  const besides = (element) => {
    const left = before(element);
    if (left?.nodeName === "LABEL" && left.control && left.control !== element) return null;
    if (left && (left.nodeType === 3 || /^(LABEL|SPAN|B|STRONG)$/.test(left.nodeName))) return ownText(left);
    return null;
  };
  // Of a label: what it holds of a field, its options say, is not what it says of it.
  const wordsOf = (label) => {
    if (!find(label, "select, textarea, script, style")) return ownText(label);
    const words = document.createTreeWalker(label, NodeFilter.SHOW_TEXT, (node) =>
      node.parentElement.closest("select, textarea, script, style") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    let text = "";
    while (words.nextNode() && text.length < 20 * limits.name) text += words.currentNode.data;
    return text;
  };

  const kindOf = (element) => {
    const tag = tagOf(element).toLowerCase();
    if (tag === "input") return /^(checkbox|radio)$/.test(element.type) ? element.type : "input " + element.type;
    if (tag === "a") return "link";
    const role = attribute(element, "role");
    if (role && /^[a-z]+$/.test(role)) return role;
    if (/^(button|select|textarea|option)$/.test(tag)) return tag;
    return editable(element) ? "textbox" : "clickable";
  };
  const stateOf = (element) => {
    const tag = tagOf(element);
    let state = "";
    if (tag === "INPUT" && /^(checkbox|radio)$/.test(element.type)) state += element.checked ? " checked" : "";
    else if (tag === "SELECT") {
      const options = Array.prototype.slice.call(element.options, 0, limits.options);
      state += ` = "${clean(element.selectedOptions[0]?.textContent ?? "")}"`;
      state += " of " + options.map((option) => `"${clean(option.textContent)}"`).join(" ");
      if (element.options.length > options.length) state += ` and ${element.options.length - options.length} more`;
    } else if (/^(INPUT|TEXTAREA)$/.test(tag) && !/^(button|submit|reset|image)$/.test(element.type)) {
      if (element.value) state += ` = "${clean(element.value)}"`;
    } else if (editable(element)) {
      const text = clean(ownText(element));
      if (text) state += ` = "${text}"`;
    }
    if (matches(element, ":disabled, [aria-disabled='true']")) state += " disabled";
    if (attribute(element, "aria-expanded") === "true") state += " expanded";
    if (attribute(element, "aria-selected") === "true") state += " selected";
    return state;
  };
  const lineOf = (element, name = nameOf(element)) => `${name} ${prefix}${idOf(element)} <${kindOf(element)}>${stateOf(element)}`;

  const ROLES = /^(button|link|checkbox|radio|tab|menuitem|option|switch|combobox|textbox|searchbox|slider|spinbutton|treeitem)$/;
  const CONTROLS = "button, select, textarea, summary, a[href], input:not([type=hidden]), [role=button], [role=link]";
  const NESTING = /^(treeitem|menuitem)$/;
  // What acts: "alone" takes everything inside for its name, "around" has other things inside that act for themselves.
  const acts = (element, tag, style, parentCursor) => {
    if (/^(BUTTON|SELECT|TEXTAREA|SUMMARY)$/.test(tag)) return "alone";
    if (tag === "INPUT") return element.type === "hidden" ? null : "alone";
    if (tag === "A" && (has(element, "href") || has(element, "xlink:href"))) return "alone";
    const role = attribute(element, "role") ?? "";
    if (ROLES.test(role)) return NESTING.test(role) && find(element, `[role=${role}]`) ? "around" : "alone";
    if (editable(element)) return "alone";
    if (tag === "BODY" || tag === "HTML") return null;
    if (hovers && matches(element, hovers)) return "around";
    // Handlers are invisible from here; a hand cursor that begins at this element is how a page tells people.
    if (has(element, "onclick") || (style.cursor === "pointer" && parentCursor !== "pointer"))
      return find(element, CONTROLS) ? "around" : "alone";
    return null;
  };

  // What shows something that it holds only while the mouse is over it is worth a click, which takes the mouse there.
  const hoverSelectors = (inner) => {
    const found = new Set();
    let left = 3000;
    for (const sheet of inner.styleSheets) {
      let rules;
      try { rules = sheet.cssRules; } catch { continue; } // of another origin
      for (const rule of rules) {
        if (left-- === 0) return found;
        if (!rule.selectorText?.includes(":hover") || rule.selectorText.length > 2000) continue;
        const { display, visibility, opacity, maxHeight } = rule.style;
        if (!maxHeight && visibility !== "visible" && (opacity || "0") === "0" && (display || "none") === "none") continue;
        for (const selector of rule.selectorText.split(",")) {
          const parts = /^\s*(\S(?:.*?))?:hover([^\s>+~:]*)\s*[\s>+~]/.exec(selector);
          if (parts && parts[1] + parts[2]) found.add((parts[1] ?? "") + parts[2]);
        }
      }
    }
    return found;
  };
  const hoversOf = (inner) => {
    const usable = [...hoverSelectors(inner)].filter((selector) => {
      try { inner.createDocumentFragment().querySelector(selector); return true; } catch { return false; }
    });
    return usable.join(", ");
  };

  let lines, run, characters, nodes, passed, cut, deep, holder, view, hovers;
  const push = (line) => {
    if (characters + line.length > limits.characters) { cut = true; return; }
    characters += line.length + 1;
    lines.push(line);
  };
  const flush = () => {
    const text = clean(run, limits.text);
    run = "";
    if (!text) return;
    if (holder) {
      const element = holder;
      holder = null;
      push(lineOf(element, clean(text)));
    } else push(text);
  };
  // `top`: only what is not wholly above this is read.
  const walk = (node, depth, parentCursor, top, shown = true) => {
    if (cut) return;
    const type = typeOf(node);
    if (type === 1 && top !== null && depth > 0) {
      const box = rectangle(node);
      if (box.height > 0 && box.bottom < top) { if (++passed > 25 * limits.nodes) cut = true; return; }
    }
    if (++nodes > limits.nodes) { cut = true; return; }
    if (depth > limits.depth) { deep = true; return; }
    if (type === 3) { if (shown && run.length < limits.text) run += node.data.slice(0, 20 * limits.text); return; }
    if (type !== 1) return;
    const tag = tagOf(node);
    if (/^(SCRIPT|STYLE|NOSCRIPT|TEMPLATE|HEAD|OPTION)$/.test(tag)) return;
    if (skip && matches(node, skip)) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || (style.opacity === "0" && tag !== "LABEL")) return;
    const seen = isSeen(style);
    if (tag === "IFRAME" || tag === "FRAME") { if (seen) enter(node, depth, top); return; }
    const how = seen ? acts(node, tag, style, parentCursor) : null;
    if (how === "alone" && boxOf(node)) {
      flush();
      push(lineOf(node));
      return;
    }
    // The words of a checkbox or a field are its name already. One that is hidden is used through them.
    if (tag === "LABEL" && node.control && !node.control.matches("select")) {
      const control = node.control, its = getComputedStyle(control);
      if (its.display !== "none" && isSeen(its) && boxOf(control)) {
        if (node.contains(control)) walk(control, depth + 1, style.cursor, top);
      } else if (seen && control.type !== "hidden") {
        flush();
        push(lineOf(control));
      }
      for (const link of node.querySelectorAll("a[href], button")) if (link !== control) walk(link, depth + 1, style.cursor, top);
      return;
    }
    const block = style.display !== "inline" && style.display !== "contents";
    if (block) flush();
    const outer = holder;
    if (how === "around") { flush(); holder = node; }
    let children = childrenOf(shadowOf(node) ?? node);
    if (tag === "SLOT") { const given = node.assignedNodes(); if (given.length) children = given; }
    if (tag === "DETAILS" && !has(node, "open")) children = [...children].filter((child) => child.nodeName === "SUMMARY").slice(0, 1);
    // Text is as visible as what it stands in; an element in there may be visible again.
    for (const child of children) walk(child, depth + 1, style.cursor, top, style.visibility === "visible");
    if (how === "around") { flush(); holder = outer; }
    if (block) flush();
    else run += " ";
  };
  const enter = (element, depth, top) => {
    flush();
    const box = rectangle(element);
    if (box.width < 2 || box.height < 2) return;
    const inner = element.contentDocument;
    if (inner) {
      const outer = [view, hovers];
      view = inner.defaultView;
      hovers = hoversOf(inner);
      const body = bodyOf(inner);
      if (body) walk(body, depth + 1, "auto", null);
      [view, hovers] = outer;
    } else if (memory.frames.length < limits.frames) {
      push(`\u0001${memory.frames.length}\u0001`);
      memory.frames.push(element);
    }
    flush();
  };
  const bodyOf = (inner) => getter(Document, "body")(inner) ?? getter(Document, "documentElement")(inner);
  const read = (top) => {
    [lines, run, characters, nodes, passed, cut, deep, holder] = [[], "", 0, 0, 0, false, false, null];
    memory.frames = [];
    view = window;
    hovers = hoversOf(document);
    const body = bodyOf(document);
    if (body) walk(body, 0, "auto", top);
    flush();
    if (top !== null) lines.unshift("[page above left out]");
    if (cut || deep) lines.push("[page cut here]");
  };
  read(null);
  // What is too long to be read as a whole is read from where it has been scrolled to.
  if (cut && window.scrollY > 0) read(0);
  // The document, without what is not part of the page: a score display would tell a reward model the answer.
  const documentOf = () => {
    const copy = getter(Document, "documentElement")(document)?.cloneNode(true);
    if (skip) copy?.querySelectorAll(skip).forEach((element) => element.remove());
    return (copy?.outerHTML ?? "").slice(0, limits.html);
  };
  // Half a surrogate pair, which a page may hold, cannot be written to a file.
  return {
    text: lines.join("\n").toWellFormed(),
    title: clean(getter(Document, "title")(document)).toWellFormed(),
    url: location.href.slice(0, 8000),
    html: limits.html ? documentOf().toWellFormed() : "",
    frames: memory.frames.length,
  };
}
