"use strict";
/* The list, its filters, the keys, and which rollout is shown. Kept in the address: #<its number>. */

(() => {
  const { element, number, signed, textNodes, visible, status, render } = rolloutView;
  const PAGE = 100;
  const SHADES = ["probability", "advantage", "none"];
  const LEGENDS = {
    probability: "The fuller the shade, the less probable the token was when it was sampled; below 0.1 it is underlined as well.",
    advantage: "Blue: better than its group. Orange, dotted underline: worse. The fuller, the further from its mean; unshaded rollouts were not trained.",
    none: "",
  };
  const COLUMNS = [
    ["step", "Step", (row) => row.step],
    ["task", "Task", (row) => row.task],
    ["status", "Status", (row) => row.status],
    ["reward", "Reward", (row) => row.reward],
    ["advantage", "Adv.", (row) => row.advantage],
    ["turns", "Turns", (row) => row.turns],
    ["tokens", "Tokens", (row) => row.tokens],
    ["violated", "Safety", (row) => (row.checked ? row.violated.length : null)],
  ];
  const byId = (id) => document.getElementById(id);
  const rows = JSON.parse(byId("index").textContent).rows;
  rows.forEach((row, place) => { row.place = place; });
  const places = new Map(rows.map((row) => [`#${row.number}`, row.place]));
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) || []), row]);
  const largest = rows.reduce((most, row) => Math.max(most, Math.abs(row.advantage || 0)), 0);
  const form = byId("filters");
  const state = { shown: rows, drawn: 0, selected: -1, sort: null, descending: false, sideBySide: false };

  const bodyOf = (row) => JSON.parse(byId(`rollout-${row.place}`).textContent);
  const wide = () => matchMedia("(min-width: 60rem)").matches;

  /* ---- the list ---- */

  function tableRow(row) {
    const cell = (kind, ...children) => element("td", { class: kind }, ...children);
    const safety = !row.checked ? "–" : row.violated.length ? `✗ ${row.violated.join(" ")}` : "✓";
    const node = element("tr", { "data-place": row.place, tabindex: "-1", "aria-selected": String(row.place === state.selected) },
      cell("number", String(row.step)),
      cell("task", ...textNodes(row.task), element("span", { class: "place" }, ` ${row.split === "train" ? "" : `${row.split} `}#${row.member}`)),
      cell("", status(row.status)),
      cell("number", number(row.reward)),
      cell("number", signed(row.advantage)),
      cell("number", String(row.turns)),
      cell("number", row.tokens === null ? "–" : String(row.tokens)),
      cell(row.violated.length ? "broken" : "", safety));
    return node;
  }

  function draw(upTo) {
    const end = Math.min(upTo, state.shown.length);
    if (end <= state.drawn) return;
    byId("rows").append(...state.shown.slice(state.drawn, end).map(tableRow));
    state.drawn = end;
  }

  function passes(row, f) {
    const within = (value, low, high) =>
      (low === "" && high === "") ||
      (value !== null && (low === "" || value >= Number(low)) && (high === "" || value <= Number(high)));
    return (f.text === "" || `${row.task} ${row.id}`.toLowerCase().includes(f.text.toLowerCase())) &&
      (f.status === "" || row.status === f.status) &&
      (f.split === "" || row.split === f.split) &&
      (f.safety === "" || (f.safety === "any check" ? row.violated.length > 0 : row.violated.includes(f.safety))) &&
      within(row.step, f.step_from, f.step_to) && within(row.reward, f.reward_from, f.reward_to);
  }

  function sorted(chosen) {
    if (!state.sort) return chosen;
    const key = COLUMNS.find(([name]) => name === state.sort)[2];
    const sign = state.descending ? -1 : 1;
    return [...chosen].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null);  // without a value: last
      return (x < y ? -sign : x > y ? sign : 0) || a.place - b.place;
    });
  }

  function refresh() {
    const f = Object.fromEntries(new FormData(form));
    state.shown = sorted(rows.filter((row) => passes(row, f)));
    state.drawn = 0;
    byId("rows").replaceChildren();
    draw(PAGE);
    byId("scroll").scrollTop = 0;
    byId("nothing").hidden = state.shown.length > 0;
    for (const th of byId("columns").children) {
      const on = th.dataset.name === state.sort;
      th.setAttribute("aria-sort", on ? (state.descending ? "descending" : "ascending") : "none");
    }
    const rewards = state.shown.filter((row) => row.reward !== null).map((row) => row.reward);
    const mean = rewards.length ? `, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
    const of = state.shown.length === rows.length ? "" : ` of ${rows.length}`;
    byId("summary").textContent = `${state.shown.length}${of} rollouts${mean}`;
    mark();
  }

  function mark() {
    for (const tr of byId("rows").children) {
      const on = Number(tr.dataset.place) === state.selected;
      tr.setAttribute("aria-selected", String(on));
      tr.tabIndex = on ? 0 : -1;
    }
    const first = byId("rows").firstElementChild;
    if (first && !byId("rows").querySelector("[tabindex='0']")) first.tabIndex = 0;
  }

  /* ---- one rollout ---- */

  function show(row) {
    state.selected = row.place;
    const siblings = state.sideBySide ? groups.get(row.group) : [row];
    byId("view").className = state.sideBySide ? "group" : "";
    byId("view").replaceChildren(...siblings.map((sibling) => {
      const node = render(sibling, bodyOf(sibling), largest);
      node.classList.toggle("chosen", state.sideBySide && sibling === row);
      return node;
    }));
    byId("bar").hidden = false;
    document.body.dataset.view = "rollout";
    byId("detail").scrollTop = 0;
    const chosen = byId("view").querySelector(".chosen");
    if (chosen) byId("view").scrollLeft = chosen.offsetLeft - byId("view").offsetLeft;
    const members = groups.get(row.group);
    byId("previous").disabled = byId("next").disabled = byId("group").disabled = members.length < 2;
    document.title = `${visible(row.id)}: rollouts`;
    if (location.hash !== `#${row.number}`) history.replaceState(null, "", `#${row.number}`);
    mark();
    shade(document.body.dataset.shade);
  }

  function backToList() {
    if (state.sideBySide) setSideBySide(false);
    document.body.dataset.view = "list";
    const row = byId("rows").querySelector(`[data-place="${state.selected}"]`) || byId("rows").firstElementChild;
    if (row) row.focus();
  }

  function step(by) {
    const at = state.shown.findIndex((row) => row.place === state.selected);
    const to = at < 0 ? 0 : at + by;
    if (to < 0 || to >= state.shown.length) return;
    draw(Math.max(state.drawn, to + PAGE / 2));
    const inDetail = byId("detail").contains(document.activeElement);
    if (wide() || document.body.dataset.view === "rollout") show(state.shown[to]);
    else { state.selected = state.shown[to].place; mark(); }
    const tr = byId("rows").children[to];
    if (!inDetail) tr.focus({ preventScroll: true });
    tr.scrollIntoView({ block: "nearest" });
  }

  function sibling(by) {
    if (state.selected < 0) return;
    const members = groups.get(rows[state.selected].group);
    const at = members.findIndex((row) => row.place === state.selected);
    show(members[(at + by + members.length) % members.length]);
  }

  function setSideBySide(on) {
    state.sideBySide = on;
    document.body.dataset.side = String(on);  // the list gives its room to the group
    byId("group").setAttribute("aria-pressed", String(on));
    show(rows[state.selected]);
  }

  function sideBySide() {
    if (state.selected < 0 || byId("group").disabled) return;
    setSideBySide(!state.sideBySide);
  }

  function shade(by) {
    document.body.dataset.shade = by;
    byId("shade").value = by;
    byId("legend").textContent = LEGENDS[by];
    byId("legend").hidden = !LEGENDS[by] || state.selected < 0;
  }

  function theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }

  /* ---- what is pressed ---- */

  const KEYS = {
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    "]": () => sibling(1), "[": () => sibling(-1), g: sideBySide, t: theme,
    s: () => shade(SHADES[(SHADES.indexOf(document.body.dataset.shade) + 1) % SHADES.length]),
    "/": () => { backToList(); form.elements.text.focus(); },
    "?": () => byId("help").showModal(),
    Escape: backToList,
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    const typing = event.target.closest("input, select");
    if (typing && event.key !== "Escape") return;
    const inDetail = byId("detail").contains(event.target);
    if (inDetail && event.key.startsWith("Arrow")) return;  // they scroll, or go along tokens
    if (event.key === "Enter" && event.target.closest("#rows tr")) {
      show(rows[Number(event.target.closest("tr").dataset.place)]);
      byId("detail").focus();
      event.preventDefault();
    } else if (Object.hasOwn(KEYS, event.key)) {
      event.preventDefault();
      KEYS[event.key]();
    }
  });
  byId("rows").addEventListener("click", (event) => {
    const tr = event.target.closest("tr");
    if (tr) show(rows[Number(tr.dataset.place)]);
  });
  byId("scroll").addEventListener("scroll", () => {
    const box = byId("scroll");
    if (box.scrollTop + 2 * box.clientHeight > box.scrollHeight) draw(state.drawn + PAGE);
  });
  form.addEventListener("input", refresh);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(refresh));  // when the fields are empty
  byId("shade").addEventListener("change", (event) => shade(event.target.value));
  for (const [id, act] of [["back", backToList], ["previous", () => sibling(-1)], ["next", () => sibling(1)],
    ["group", sideBySide], ["theme", theme], ["help-button", KEYS["?"]]]) byId(id).addEventListener("click", act);
  addEventListener("hashchange", fromAddress);

  function fromAddress() {
    const place = places.get(location.hash);
    if (place !== undefined) show(rows[place]);
  }

  /* ---- start ---- */

  function options(name, values) {
    form.elements[name].append(...values.map((value) => element("option", { value }, visible(value))));
  }

  byId("columns").append(...COLUMNS.map(([name, label]) => {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      state.descending = state.sort === name && !state.descending;
      state.sort = name;
      refresh();
    });
    return element("th", { scope: "col", "data-name": name }, button);
  }));
  options("status", [...new Set(rows.map((row) => row.status))].sort());
  options("split", [...new Set(rows.map((row) => row.split))].sort());
  options("safety", ["any check", ...new Set(rows.flatMap((row) => row.violated))].sort());
  refresh();
  fromAddress();
  document.documentElement.dataset.readyMs = performance.now().toFixed(0);
})();
