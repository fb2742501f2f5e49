"use strict";
/* One rollout as elements. Whatever a model, a user or a tool wrote goes in as text nodes only. */

const rolloutView = (() => {
  // Control and format characters, lone surrogates, private and unassigned ones, line separators:
  // what would not be seen, or would turn the direction of the text round. As visible() in entries.py.
  const HIDDEN = /[^\P{C}\n\t]|[\p{Zl}\p{Zp}]/gu;
  const LONG_RESULT = 1500;

  function element(name, properties, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(properties || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "class") node.className = value;
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const codePoint = (character) =>
    "<U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + ">";

  /* The text with hidden characters spelled out; a plain string. */
  const visible = (text) => String(text).replace(HIDDEN, codePoint);

  /* The same as nodes, each spelled-out character marked. */
  function textNodes(value) {
    const text = String(value);
    const nodes = [];
    let end = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match.index > end) nodes.push(text.slice(end, match.index));
      nodes.push(element("span", { class: "hidden-character" }, codePoint(match[0])));
      end = match.index + match[0].length;
    }
    if (end < text.length) nodes.push(text.slice(end));
    return nodes;
  }

  const number = (value, digits = 3) =>
    value === null || value === undefined ? "–" : Number(value).toFixed(digits);
  const signed = (value) =>
    value === null || value === undefined ? "–" : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);

  function tokens(turn, place, row, largest) {
    const box = element("div", {
      class: "tokens", tabindex: "0", role: "group",
      "aria-label": `turn ${place}: ${turn.ids.length} tokens; left and right go along them`,
    });
    const readout = element("p", { class: "readout", "aria-live": "polite" });
    const trained = row.advantage !== null && !row.why;
    const strength = trained && largest > 0 ? Math.abs(row.advantage) / largest : 0;
    turn.ids.forEach((id, i) => {
      const piece = turn.pieces ? turn.pieces[i] : `[${id}]`;
      const probability = Math.exp(turn.logprobs[i]);
      const token = element("span", {
        class: "token" + (probability < 0.1 ? " improbable" : "") + (trained && row.advantage < 0 ? " worse" : ""),
      }, ...(piece === "" ? [element("span", { class: "hidden-character" }, "·")] : textNodes(piece)));
      token.style.setProperty("--p", `${Math.round((1 - probability) * 100)}%`);
      token.style.setProperty("--a", `${Math.round(strength * 100)}%`);
      box.append(token);
    });
    let current = -1;
    function show(i) {
      if (i < 0 || i >= turn.ids.length) return;
      if (current >= 0) box.children[current].classList.remove("current");
      current = i;
      box.children[i].classList.add("current");
      const piece = turn.pieces ? visible(JSON.stringify(turn.pieces[i])) : "";
      readout.textContent = `token ${i + 1} of ${turn.ids.length}: ${piece} id ${turn.ids[i]}, ` +
        `p ${Math.exp(turn.logprobs[i]).toPrecision(3)}, log p ${turn.logprobs[i].toFixed(3)}, ` +
        `advantage ${signed(row.advantage)}`;
    }
    box.addEventListener("mouseover", (event) => {
      const token = event.target.closest(".token");
      if (token) show(Array.prototype.indexOf.call(box.children, token));
    });
    box.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: Math.max(current - 1, 0), ArrowRight: current + 1, Home: 0, End: turn.ids.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(to);
    });
    return [box, readout];
  }

  function call(toolCall) {
    return element("div", { class: "call" },
      element("span", { class: "call-name" }, ...textNodes(toolCall.name)),
      element("pre", { dir: "auto" }, ...textNodes(JSON.stringify(toolCall.arguments, null, 2))));
  }

  /* JSON is laid out; anything else stays as it is. */
  function laidOut(text) {
    if (!/^[[{]/.test(text)) return text;
    try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
  }

  function message(body, place, row, largest) {
    const m = body.messages[place];
    const marks = ["error", "refused", "dropped"].filter((mark) => m[mark]);
    const node = element("article", { class: `message ${["user", "assistant", "tool", "system"].includes(m.role) ? m.role : "other"}`, "data-place": place, tabindex: "-1" },
      element("h3", null, ...textNodes(m.role), element("span", { class: "place" }, ` ${place}`),
        ...marks.map((mark) => element("span", { class: `mark ${mark}` }, mark))));
    if (m.turn !== undefined && body.turns[m.turn]) {
      node.append(...tokens(body.turns[m.turn], m.turn, row, largest));
      if (m.tool_calls) {
        node.append(element("details", { class: "parsed" },
          element("summary", null, `read as ${m.tool_calls.length === 1 ? "a call" : m.tool_calls.length + " calls"} of `,
            ...textNodes(m.tool_calls.map((c) => c.name).join(", "))),
          ...m.tool_calls.map(call)));
      }
      return node;
    }
    const content = m.role === "tool" ? laidOut(m.content) : m.content;
    if (content !== "") {
      const text = element("div", { class: "text", dir: "auto" }, ...textNodes(content));
      node.append(content.length <= LONG_RESULT ? text : element("details", null,
        element("summary", null, `${content.length} characters: `, ...textNodes(m.content.slice(0, 120)), "…"), text));
    }
    node.append(...(m.tool_calls || []).map(call));
    return node;
  }

  /* A status that may be broken after its underscores. */
  function status(name) {
    const parts = name.split(/(?<=_)/).flatMap((part) => [element("wbr"), part]).slice(1);
    return element("span", { class: `status ${name.split("_")[0]}` }, ...parts);
  }

  function numbers(title, values, open) {
    const pairs = Object.entries(values).map(([name, value]) => element("div", null,
      element("dt", null, ...textNodes(name)),
      element("dd", null, Number.isInteger(value) ? String(value) : number(value))));
    return pairs.length === 0 ? null : element("details", { class: "numbers", open },
      element("summary", null, title), element("dl", null, ...pairs));
  }

  function findingItem(finding, root) {
    const jump = element("button", { type: "button", class: "jump" }, `message ${finding.message}`);
    jump.addEventListener("click", () => {
      const target = root.querySelector(`[data-place="${finding.message}"]`);
      target.scrollIntoView({ block: "center" });
      target.focus({ preventScroll: true });
    });
    return element("li", null, jump, " ", ...textNodes(finding.text));
  }

  function safety(body, root) {
    if (!body.findings) return null;
    const of = { broken: [], kept: [], "did not apply": [] };
    for (const [name, found] of Object.entries(body.findings)) {
      const bad = found.some((finding) => !finding.passed);
      of[bad ? "broken" : found.length ? "kept" : "did not apply"].push(name);
    }
    const box = element("details", { class: "safety", open: of.broken.length > 0 },
      element("summary", null, of.broken.length ? `Safety: ✗ ${of.broken.join(", ")} broken` : "Safety: ✓ nothing broken"));
    for (const name of of.broken) {
      const bad = body.findings[name].filter((finding) => !finding.passed);
      box.append(element("p", { class: "broken" }, `${name} broken`), element("ul", null, ...bad.map((f) => findingItem(f, root))));
    }
    for (const verdict of ["kept", "did not apply"]) {
      if (of[verdict].length) box.append(element("p", null, `${verdict}: ${of[verdict].join(", ")}`));
    }
    return box;
  }

  /* The element of a rollout. row: of the index; largest: the largest |advantage| of the file. */
  function render(row, body, largest) {
    const root = element("div", { class: "rollout" });
    const fact = (name, ...value) => element("div", null, element("dt", null, name), element("dd", null, ...value));
    root.append(
      element("h2", null, ...textNodes(row.task), element("span", { class: "place" }, ` rollout ${row.member}`)),
      element("p", { class: "id" }, ...textNodes(row.id)),
      element("dl", { class: "facts" },
        fact("Reward", number(row.reward)),
        fact("Advantage", signed(row.advantage), row.why ? ` (not trained: ${row.why})` : ""),
        fact("Status", status(row.status)), fact("Step", String(row.step)),
        fact("Policy", body.version === null ? "–" : String(body.version))));
    if (body.error) root.append(element("pre", { class: "error" }, ...textNodes(body.error)));
    for (const part of [numbers("Reward is made of", body.breakdown, true), numbers("Counted", body.stats, false), safety(body, root)]) {
      if (part) root.append(part);
    }
    body.messages.forEach((_, place) => root.append(message(body, place, row, largest)));
    return root;
  }

  return { element, number, signed, textNodes, visible, status, render };
})();
