"use strict";
// The browser of completions. Model text enters the page through textContent alone.
(() => {
  const browser = document.getElementById("browser");
  if (!browser) return;
  const views = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const FAR = 7; // nats below which a token has the full colour: a probability of 0.001
  let view = 0, group = 0;
  const tokens = new WeakMap(); // token element -> [sample, index]

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const number = (value, digits = 4) => (value === null ? "not measured" : Number(value).toFixed(digits));
  const probability = (value) => (value === null ? "" : ` (p ${Number(Math.exp(Number(value)).toPrecision(3))})`);
  const heat = (nats) => {
    const share = Math.min(Math.abs(Number(nats)) / FAR, 1);
    return share > 0 ? `rgb(var(--heat) / ${(0.72 * share ** 0.7).toFixed(3)})` : "";
  };
  const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  const placeOf = (sample, index) => (index < sample.gap ? index : index + sample.left_out);

  function versionAt(sample, index) {
    for (const [version, count] of sample.runs) {
      if (index < count) return version;
      index -= count;
    }
  }

  function tokenElement(sample, index, colour, turns) {
    const made = element("span", "t");
    const piece = sample.pieces[index];
    if (piece === "") made.append(element("span", "faint", "·"));
    piece.split("\n").forEach((line, place) => {
      if (place) made.append(element("span", "faint", "↵"), "\n");
      made.append(line);
    });
    const value = sample[colour][index];
    if (value !== null) made.style.background = heat(value);
    if (placeOf(sample, index) < sample.given) made.classList.add("given");
    if (turns.has(index)) made.classList.add("turn");
    tokens.set(made, [sample, index]);
    return made;
  }

  function card(sample, colour, best) {
    const made = element("article", best ? "best" : "");
    const head = element("header");
    const fact = (text, title, className) => {
      const part = element("span", className, text);
      if (title) part.title = title;
      head.append(part);
    };
    if (sample.caption) head.append(element("b", "", sample.caption));
    fact(sample.reward === null ? "no reward" : `reward ${Number(sample.reward.toFixed(4))}`, "", "reward");
    fact(`sample ${sample.index}`);
    fact(`ended by ${sample.stop}`);
    fact(plural(sample.length, "token"));
    if (sample.versions.length) {
      const [first, last] = sample.versions;
      fact(first === last ? `version ${first}` : `versions ${first} – ${last}`, "of the weights that drew it");
    }
    if (sample.temperature === 0) fact("greedy");
    made.append(head);
    if (sample.problem) made.append(element("p", "problem", sample.problem));
    const text = element("div", "text");
    const turns = new Set();
    let passed = 0;
    for (const [, count] of sample.runs.slice(0, -1)) turns.add((passed += count));
    sample.pieces.forEach((_, index) => {
      if (index === sample.gap && sample.left_out) {
        text.append(element("span", "gap", `… ${plural(sample.left_out, "token")} left out …`));
      }
      text.append(tokenElement(sample, index, colour, turns));
    });
    if (!sample.pieces.length) text.append(element("span", "faint", "no tokens"));
    made.append(text);
    return made;
  }

  function show() {
    const { groups } = views[view];
    const shown = groups[group];
    const colour = by("colour").value;
    browser.querySelectorAll("[data-view]").forEach((tab) => {
      tab.setAttribute("aria-selected", Number(tab.dataset.view) === view);
    });
    fill(by("heading"), [...new Set(groups.map((g) => g.heading))].map((h) => [h, h]), shown.heading);
    by("heading").hidden = groups.every((g) => g.heading === "");
    const alike = groups.map((g, index) => [g.prompt_id, index]).filter(([, index]) => groups[index].heading === shown.heading);
    fill(by("prompt"), alike, group);
    by("position").textContent = `${group + 1} / ${groups.length}`;
    by("previous").disabled = group === 0;
    by("next").disabled = group === groups.length - 1;
    legend(colour, shown);
    const cut = shown.prompt_left_out ? `, the last ${plural(shown.prompt_len - shown.prompt_left_out, "token")} shown` : "";
    by("prompt-summary").textContent = `Prompt ${shown.prompt_id}, ${plural(shown.prompt_len, "token")}${cut}`;
    by("prompt-text").textContent = shown.prompt;
    by("metadata").hidden = !shown.metadata;
    by("metadata-text").textContent = shown.metadata;
    const rewards = shown.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    const cards = shown.samples.map((sample) => card(sample, colour, sample.reward === high && high > low));
    if (shown.left_out) cards.push(element("p", "quiet", `${plural(shown.left_out, "more sample")} not shown.`));
    by("samples").replaceChildren(...cards);
    by("tip").hidden = true;
    try { history.replaceState(null, "", `#${view}.${group}`); } catch { /* some viewers of local files forbid it */ }
  }

  function fill(select, options, value) {
    select.replaceChildren(...options.map(([text, key]) => {
      const option = element("option", "", text);
      option.value = key;
      return option;
    }));
    select.value = value;
  }

  function legend(colour, shown) {
    const levels = [1, 0.5, 0.1, 0.01, 0.001];
    by("scale").replaceChildren(
      colour === "entropy" ? "nats " : "probability ",
      ...levels.map((level) => {
        const nats = -Math.log(level);
        const swatch = element("span", "t", colour === "entropy" ? String(Number(nats.toFixed(1))) : String(level));
        swatch.style.background = heat(nats);
        return swatch;
      }),
    );
    const marks = [];
    if (shown.samples.some((sample) => sample.given)) marks.push("dotted: given, not drawn");
    if (shown.samples.some((sample) => sample.runs.length > 1)) marks.push("bar: new weights from here on");
    if (colour === "behaviour" && isGreedy(shown)) marks.push("greedy: every token was certain");
    by("marks").textContent = marks.join(" · ");
  }

  const isGreedy = (g) => g.samples.every((sample) => sample.behaviour.every((value) => value === 0));

  function go(to) {
    if (to < 0 || to >= views[view].groups.length) return;
    group = to;
    show();
  }

  function open(nextView, nextGroup = 0) {
    view = nextView;
    group = Math.min(nextGroup, views[view].groups.length - 1);
    if (views[view].groups.every(isGreedy)) by("colour").value = "model"; // else nothing would have a colour
    else if (by("colour").value === "model") by("colour").value = "behaviour";
    show();
  }

  function tip(target) {
    browser.querySelectorAll(".t.on").forEach((other) => other.classList.remove("on"));
    const found = target && tokens.get(target);
    by("tip").hidden = !found;
    if (!found) return;
    const [sample, index] = found;
    target.classList.add("on");
    const rows = [
      ["id", sample.ids[index]],
      ["behaviour", number(sample.behaviour[index]) + probability(sample.behaviour[index])],
      ["model", number(sample.model[index]) + probability(sample.model[index])],
      ["kept mass", number(sample.kept[index])],
      ["entropy", number(sample.entropy[index])],
      ["version", versionAt(sample, index)],
      ["token", `${placeOf(sample, index)} of 0 – ${sample.length - 1}`],
    ];
    const table = element("table");
    rows.forEach(([name, value]) => {
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = value;
    });
    const piece = sample.pieces[index];
    by("tip").replaceChildren(element("b", "", piece === "" ? "part of a character" : JSON.stringify(piece)), table);
    const [box, size] = [target.getClientRects()[0], by("tip").getBoundingClientRect()];
    const top = box.bottom + 6 + size.height > innerHeight ? box.top - size.height - 6 : box.bottom + 6;
    by("tip").style.top = `${Math.max(4, top)}px`;
    by("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - size.width - 8))}px`;
  }

  by("samples").addEventListener("pointerover", (event) => tip(event.target.closest(".t")));
  // A finger leaves at once when it is lifted: what it has shown stays until it touches something else.
  by("samples").addEventListener("pointerleave", (event) => event.pointerType === "mouse" && tip(null));
  addEventListener("pointerdown", (event) => event.target.closest?.(".t") || tip(null));
  addEventListener("scroll", () => tip(null), { passive: true, capture: true });
  by("previous").addEventListener("click", () => go(group - 1));
  by("next").addEventListener("click", () => go(group + 1));
  by("prompt").addEventListener("change", (event) => go(Number(event.target.value)));
  by("heading").addEventListener("change", (event) => {
    go(views[view].groups.findIndex((g) => g.heading === event.target.value));
  });
  by("colour").addEventListener("change", show);
  browser.querySelectorAll("[data-view]").forEach((tab) => {
    tab.addEventListener("click", () => open(Number(tab.dataset.view)));
  });
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.("select, input, textarea")) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(group + step);
  });

  const [startView, startGroup] = (/^#(\d+)\.(\d+)$/.exec(location.hash) || []).slice(1).map(Number);
  if (startView < views.length) {
    open(startView, startGroup);
    browser.scrollIntoView();
  } else {
    open(0);
  }
})();
