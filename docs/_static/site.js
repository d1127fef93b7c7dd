// What moves on the site: the chain explorer, and the figures of the clip and of GAE. The first half computes and can run
// outside a browser, where the tests compare it with the package; the second half shows.
"use strict";

// --- the chain explorer: docs/_ext/explorer.py makes its table -------------------------------------------------------

const fits = (part, declared) => Object.entries(declared).every(([key, value]) => part[key] === value);
const fill = (text, names) => text.replace(/\{(\w+)\}/g, (_, name) => names[name]);

/** The error that `chain` raises for these parts; null if it accepts them. */
function chainError(rules, parts) {
  for (const group of rules)
    for (const [index, part] of parts.entries())
      for (const rule of group.filter((rule) => fits(part, rule.part))) {
        const [before, after] = [parts.slice(0, index), parts.slice(index + 1)];
        if (rule.where === "makes") {
          for (const field of part.requires) {
            if (before.some((other) => other.provides.includes(field))) continue;
            const maker = after.find((other) => other.provides.includes(field) && !readsField(other, field));
            if (maker) return fill(rule.says, { part: part.name, other: maker.name, field });
          }
        } else {
          const side = { before, after, first: before.slice(0, 1) }[rule.where];
          const others = side.filter((other) => fits(other, rule.other)).map((other) => other.name);
          if (others.length) return fill(rule.says, { part: part.name, other: others.join(" and ") });
        }
      }
  return null;
}

const readings = (part) => [...new Set([...part.requires, ...(part.reads ?? [])])];
const readsField = (part, field) =>
  readings(part).some((read) => field === read || field.startsWith(`${read}.`) || read.startsWith(`${field}.`));
const addsLoss = (part) => part.provides.includes("losses");

/** The error that `learner` raises for a chain in which something would have no effect, or null; not for phases. */
function learnerError(says, parts) {
  if (!parts.some((part) => part.divides)) return says.no_sampler;
  if (parts.some((part) => part.phases)) return null;
  for (const [index, part] of parts.entries()) {
    const [earlier, later] = [parts.slice(0, index), parts.slice(index + 1)];
    const error = lateError(says, part, earlier, later) ?? unreadError(says, part, earlier, later);
    if (error) return error;
  }
  return null;
}

/** The error of a part that changes a field after a loss has read it, where the change reaches no loss of its kind. */
function lateError(says, part, earlier, later) {
  for (const field of part.provides) {
    const missed = earlier.filter((loss) => addsLoss(loss) && readings(loss).includes(field));
    if (says.reads.includes(field) || !missed.length || !readsField(part, field)) continue;
    const ofPolicy = missed.some((loss) => loss.policy_loss);
    if (field !== "mask" && reachesLoss(says, field, later, ofPolicy)) continue;
    return fill(field === "mask" ? says.late_mask : says.late, { part: part.name, field, loss: missed[0].name });
  }
  return null;
}

function reachesLoss(says, field, later, ofPolicy) {
  const changed = new Set([field]);
  for (const reader of later) {
    if (!reader.reads) return true;
    if (![...changed].some((each) => readsField(reader, each))) continue;
    if (addsLoss(reader) && (reader.policy_loss !== false || !ofPolicy)) return true;
    reader.provides.filter((each) => !says.reads.includes(each)).forEach((each) => changed.add(each));
  }
  return false;
}

/** The error of a part that writes fields which no later part reads. */
function unreadError(says, part, earlier, later) {
  const evaluated = earlier.some((other) => other.divides);
  const fields = part.provides.filter((field) => !says.reads.includes(field.split(".")[0]));
  let left = fields;
  for (const reader of later) {
    if (!reader.reads || left.some((field) => readsField(reader, field))) return null;
    const evaluates = readings(reader).some((path) => path.split(".")[0] === "current");
    if (evaluates && !evaluated && left.some((field) => says.seen.includes(field))) return null;
    left = left.filter((field) => !reader.provides.includes(field));
  }
  if (!fields.length) return null;
  const seen = evaluated && fields.some((field) => says.seen.includes(field));
  const entries = fields.every((field) => field.includes("."));
  const overwritten = later.some((reader) => fields.every((field) => reader.provides.includes(field)));
  const unread = overwritten ? says.overwritten : entries ? says.unread_entry : says.unread;
  const other = fields.join() === "weight" ? says.unread_weight : later.some(addsLoss) ? unread : says.no_loss;
  const text = seen ? says.unread_seen : other;
  return fill(text, { part: part.name, fields: fields.join(" and "), it: fields.length === 1 ? "it" : "them" });
}

/** The errors that the chain raises at run time if nothing but its parts adds fields to what `rollout` records. */
function missingFields(missing, parts) {
  return parts.flatMap((part, index) =>
    part.requires
      .filter((field) => field in missing && !parts.slice(0, index).some((other) => other.provides.includes(field)))
      .map((field) => fill(missing[field], { part: part.name })),
  );
}

/** The Python text of a chain. */
function pythonText(parts) {
  const definitions = [...new Set(parts.flatMap((part) => part.definitions))];
  const imports = definitions.filter((text) => text.startsWith("import "));
  const others = definitions.filter((text) => !imports.includes(text)).map((text) => `${text}\n`);
  const calls = parts.map((part) => `    ${part.call},\n`).join("");
  return [...imports, "import ppo_parts as pp\n", ...others, `pipeline = pp.chain(\n${calls})`].join("\n");
}

/** Where a new part fits best: as late as possible without an error, or at the end. */
function placeFor(table, parts, part) {
  const refused = (chain) => (chainError(table.rules, chain) ? 100 : learnerError(table.learner, chain) ? 10 : 0);
  const faults = (chain) => refused(chain) + missingFields(table.missing, chain).length;
  const places = parts.map((_, index) => index).concat(parts.length).reverse();
  const counts = places.map((place) => faults(parts.toSpliced(place, 0, part)));
  return places[counts.indexOf(Math.min(...counts))];
}

// --- clip and GAE by hand --------------------------------------------------------------------------------------------

/** PPO's clipped loss, and its gradient with respect to the log-probability of the action. */
function clippedSurrogate(ratio, advantage, clipEps) {
  const bounded = advantage < 0 ? Math.max(ratio, 1 - clipEps) : Math.min(ratio, 1 + clipEps);
  const loss = -advantage * bounded;
  return { loss, gradient: bounded === ratio ? loss : 0 };
}

/** TD errors, advantages and targets of one sequence. */
function gae({ reward, value, nextValue, terminated, truncated }, gamma, gaeLambda) {
  const delta = reward.map((r, t) => r + gamma * (1 - terminated[t]) * nextValue[t] - value[t]);
  const advantage = [];
  for (let t = reward.length - 1; t >= 0; t--)
    advantage[t] = delta[t] + gamma * gaeLambda * (1 - terminated[t]) * (1 - truncated[t]) * (advantage[t + 1] ?? 0);
  return { delta, advantage, target: advantage.map((a, t) => a + value[t]) };
}

/** The sequence of the figure, whose episode ends after a step (-1: nowhere), by failure or by a time limit. */
function sequence(end, byTimeLimit) {
  const reward = [0, 1, 0, 0, 1, 0, 0, 1];
  const value = [0.6, 0.9, 0.4, 0.7, 0.8, 0.3, 0.5, 0.7];
  const ended = reward.map((_, t) => Number(t === end));
  const nextValue = value.map((_, t) => (ended[t] ? 0.5 : (value[t + 1] ?? 0.6)));
  const never = ended.map(() => 0);
  return { reward, value, nextValue, terminated: byTimeLimit ? never : ended, truncated: byTimeLimit ? ended : never };
}

// --- elements ------------------------------------------------------------------------------------------------------------

/** An element with properties, attributes (those with a dash or of ARIA) and children. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    name in made ? (made[name] = value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A table in a block that scrolls. */
function scrollable(...rows) {
  const table = element("table", { className: "table" }, ...rows);
  return element("div", { className: "pst-scrollable-table-container", tabIndex: 0 }, table);
}

// --- the page of the chain explorer ----------------------------------------------------------------------------------

const STAGES = { rollout: "before the sampler", sampler: "sampler", minibatch: "after the sampler", "": "either side" };

function stageOf(part) {
  return part.divides ? "sampler" : { after_sampler: "minibatch", anywhere: "" }[part.place] ?? "rollout";
}

function fieldList(word, fields, written) {
  const codes = fields.flatMap((field) => [" ", element("code", { className: written.has(field) ? "written" : "" }, field)]);
  return fields.length ? [element("span", {}, word, ...codes), " "] : [];
}

function startExplorer(root, table) {
  let keys = [...table.measured.rows[0].chain];
  let dragged = null;

  const groups = Object.entries(STAGES).map(([stage, label]) => {
    const names = Object.keys(table.parts).filter((key) => stageOf(table.parts[key]) === stage);
    return element("optgroup", { label }, ...names.map((key) => element("option", { value: key }, key)));
  });
  const select = element("select", { id: "explorer-part" }, ...groups);
  const add = () => {
    const parts = keys.map((key) => table.parts[key]);
    const place = placeFor(table, parts, table.parts[select.value]);
    change(keys.toSpliced(place, 0, select.value));
    list.children[place].scrollIntoView({ block: "nearest" });
  };
  const form = element(
    "form", { className: "toolbar", onsubmit: (event) => (event.preventDefault(), add()) },
    element("label", { htmlFor: "explorer-part" }, "Part"), select, element("button", {}, "Add"),
    element("button", { type: "button", onclick: () => change([]) }, "Clear"),
  );
  const status = element("div", { role: "status" });
  const list = element("ol", { className: "chain" });
  const code = element("pre", { tabIndex: 0, "aria-label": "Python text" });
  const copy = element("button", { type: "button", onclick: () => copyText(code, copy) }, "Copy");
  const measured = element("tbody");
  root.replaceChildren(
    form, status, list,
    element("div", { className: "highlight python" }, copy, code),
    measuredTable(table.measured, measured),
  );

  function change(next, focused) {
    keys = next;
    const parts = keys.map((key) => table.parts[key]);
    status.replaceChildren(...messages(table, parts));
    const sampler = parts.findIndex((part) => part.divides);
    list.replaceChildren(...parts.map((part, index) => card(part, index, parts, sampler)));
    code.textContent = pythonText(parts);
    measured.replaceChildren(...table.measured.rows.map((row) => measuredRow(row, keys, change)));
    if (focused) (list.children[focused.index]?.querySelector(`[data-does="${focused.does}"]:enabled`) ?? select).focus();
  }

  const move = (from, to) => keys.toSpliced(from, 1).toSpliced(to, 0, keys[from]);

  function card(part, index, parts, sampler) {
    const written = new Set(parts.slice(0, index).flatMap((other) => other.provides));
    const stage = index === sampler ? "sampler" : sampler < 0 ? "" : index < sampler ? "rollout" : "minibatch";
    const button = (does, sign, label, disabled, next, focus) =>
      element("button", {
        type: "button", disabled, "data-does": does, "aria-label": `${label} ${part.name}`, title: label,
        onclick: () => change(next(), { index: focus, does }),
      }, sign);
    const header = element(
      "header", { draggable: true, ondragstart: () => (dragged = index) },
      element("a", { href: part.page }, element("code", {}, part.name)), element("small", {}, stage),
      element("span", {},
        button("up", "↑", "Move up", index === 0, () => move(index, index - 1), index - 1),
        button("down", "↓", "Move down", index === parts.length - 1, () => move(index, index + 1), index + 1),
        button("remove", "✕", "Remove", false, () => keys.toSpliced(index, 1), Math.min(index, parts.length - 2))),
    );
    return element(
      "li", {
        className: stage, ondragover: (event) => event.preventDefault(),
        ondrop: (event) => (event.preventDefault(), change(move(dragged, index))),
      },
      header,
      element("p", { innerHTML: part.summary }),
      element("p", { className: "fields" },
        ...fieldList("reads", readings(part), written), part.reads ? "" : "may read any field ",
        ...fieldList("writes", part.provides, new Set())),
      element("div", { className: "equation", innerHTML: part.equation }),
    );
  }

  change(keys);
}

function messages(table, parts) {
  const box = (kind, title, lines = []) =>
    element("div", { className: `admonition ${kind}` }, element("p", { className: "admonition-title" }, title),
      ...lines.map((line) => element("p", {}, line)));
  const error = chainError(table.rules, parts);
  if (error) return [box("error", "chain raises ValueError", [error])];
  const effect = learnerError(table.learner, parts);
  if (effect) return [box("warning", "chain accepts these parts, and learner raises ValueError", [effect])];
  const missing = missingFields(table.missing, parts);
  const accepted = box("tip", "chain and learner accept these parts");
  return missing.length ? [accepted, box("warning", "To be supplied at run time", missing)] : [accepted];
}

function measuredTable({ tasks, steps }, body) {
  const titles = [`change, ${steps.toLocaleString("en")} steps`, ...tasks];
  const heads = titles.map((text) => element("th", { scope: "col" }, text));
  return scrollable(element("thead", {}, element("tr", {}, ...heads)), body);
}

function measuredRow({ what, chain, effects }, keys, change) {
  const shown = chain.join() === keys.join();
  const show = element("button", { type: "button", title: "Show this chain", onclick: () => change(chain) }, what);
  return element("tr", { className: shown ? "shown" : "" }, ...[show, ...effects].map((cell) => element("td", {}, cell)));
}

async function copyText(code, button) {
  getSelection().selectAllChildren(code);
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Selected"; // the browser does not let this page copy
  }
}

// --- the figures by hand ---------------------------------------------------------------------------------------------

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/**
 * A figure with controls: names, properties of the input, and perhaps what is shown as its value.
 * `draw(values, width)` returns what the drawing contains, and what stands below it.
 */
function startFigure(root, label, height, controls, draw) {
  const svg = drawing("svg", { role: "img", "aria-label": label, height });
  const below = element("div", { role: "status" });
  const inputs = controls.map(([name, settings]) => element("input", { type: "range", "aria-label": name, ...settings }));
  const outputs = inputs.map(() => element("output"));
  const update = () => {
    if (!root.clientWidth) return; // not laid out yet
    const values = inputs.map((input) => (input.type === "checkbox" ? input.checked : Number(input.value)));
    values.forEach((value, index) => (outputs[index].textContent = controls[index][2]?.(value) ?? value));
    const [shapes, ...text] = draw(values, root.clientWidth);
    svg.replaceChildren(...shapes);
    below.replaceChildren(...text);
  };
  const names = controls.map(([name]) => element("span", {}, name));
  const rows = inputs.map((input, index) => element("label", {}, names[index], input, outputs[index]));
  root.replaceChildren(...rows, svg, below);
  root.oninput = update;
  new ResizeObserver(update).observe(root);
}

function line(className, points) {
  return drawing("polyline", { class: className, points: points.map((point) => point.join()).join(" ") });
}

function words(x, y, text, anchor = "middle") {
  return drawing("text", { x, y, "text-anchor": anchor }, text);
}

function startClip(root) {
  const controls = [
    ["ratio r", { min: 0, max: 2, step: 0.01, value: 1.4 }],
    ["advantage A", { min: -2, max: 2, step: 0.1, value: 1 }],
    ["clip range ε", { min: 0.05, max: 0.5, step: 0.01, value: 0.2 }],
  ];
  startFigure(root, "The clipped loss as a function of the ratio", 260, controls, ([ratio, advantage, clipEps], width) => {
    const [x, y] = [(r) => 10 + (r / 2) * (width - 20), (loss) => 120 - (loss / 4) * 110];
    const ratios = [0, 1 - clipEps, 1 + clipEps, 2];
    const { loss, gradient } = clippedSurrogate(ratio, advantage, clipEps);
    const shapes = [
      drawing("rect", { class: "band", x: x(1 - clipEps), y: 10, width: x(2 * clipEps) - x(0), height: 220 }),
      line("axis", [[x(0), y(0)], [x(2), y(0)]]),
      line("plain", [[x(0), y(0)], [x(2), y(-2 * advantage)]]),
      line("curve", ratios.map((r) => [x(r), y(clippedSurrogate(r, advantage, clipEps).loss)])),
      drawing("circle", { cx: x(ratio), cy: y(loss), r: 6 }),
      ...[0, 0.5, 1, 1.5].map((r) => words(x(r), 250, r, r ? "middle" : "start")),
      words(x(2), 250, "ratio 2", "end"),
      words(x(0), 20, "loss", "start"),
    ];
    const clipped = advantage && !gradient ? " (clipped)" : "";
    const numbers = `Loss ${loss.toFixed(3)}, gradient with respect to log π(a) ${gradient.toFixed(3)}${clipped}.`;
    return [shapes, element("p", {}, numbers)];
  });
}

function startGae(root) {
  const controls = [
    ["discount γ", { min: 0, max: 1, step: 0.01, value: 0.99 }],
    ["trace decay λ", { min: 0, max: 1, step: 0.01, value: 0.95 }],
    ["episode ends after step", { min: -1, max: 7, step: 1, value: 4 }, (step) => (step < 0 ? "never" : step)],
    ["by a time limit", { type: "checkbox" }, (checked) => (checked ? "yes" : "no")],
  ];
  const draw = ([gamma, gaeLambda, end, byTimeLimit], width) => {
    const steps = sequence(end, byTimeLimit);
    const { delta, advantage, target } = gae(steps, gamma, gaeLambda);
    const [x, y] = [(t) => 10 + (t / delta.length) * (width - 20), (a) => 150 - a * 42];
    const bar = (kind, left, a) => {
      const [top, height] = [Math.min(y(0), y(a)), Math.abs(y(a) - y(0))];
      return drawing("rect", { class: kind, x: x(left), width: x(0.3) - x(0), y: top, height });
    };
    const shapes = [
      ...delta.map((d, t) => bar("delta", t + 0.2, d)),
      ...advantage.map((a, t) => bar("advantage", t + 0.5, a)),
      ...delta.map((_, t) => words(x(t + 0.5), 210, t)),
      line("axis", [[x(0), y(0)], [x(delta.length), y(0)]]),
      ...(end < 0 ? [] : [line("end", [[x(end + 1), 10], [x(end + 1), 195]])]),
    ];
    const rows = { r: steps.reward, V: steps.value, "V′": steps.nextValue, δ: delta, A: advantage, target };
    const texts = Object.entries(rows).map(([name, row]) => [name, row.map((x) => x.toFixed(2))]);
    const table = [["step t", Object.keys(delta)], ...texts].map(([name, row]) =>
      element("tr", {}, element("th", { scope: "row" }, name), ...row.map((text) => element("td", {}, text))));
    return [shapes, scrollable(...table)];
  };
  startFigure(root, "TD errors and advantages of eight steps", 220, controls, draw);
}

// --- agents: docs/_ext/agents.py trains them -------------------------------------------------------------------------

/** The output of a multilayer perceptron with tanh between its layers, whose last rows are the biases. */
function perceptron(layers, obs) {
  return layers.reduce((x, layer, depth) => {
    const bias = layer.at(-1);
    const sums = bias.map((b, j) => x.reduce((sum, input, i) => sum + input * layer[i][j], b));
    return depth < layers.length - 1 ? sums.map(Math.tanh) : sums;
  }, obs);
}

const mode = (logits) => logits.indexOf(Math.max(...logits));
const uniform = (low, high) => low + (high - low) * Math.random();
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** A step of Breakout; the ball moves diagonally, and bounces off walls, bricks and the paddle. */
function breakout({ x, y, dx, dy, paddle, bricks, inBrick, score }, action) {
  paddle = clamp(paddle + [0, -1, 1][action], 0, 9);
  let [nextX, nextY, over] = [x + dx, y + dy, false];
  if (nextX < 0 || nextX > 9) [nextX, dx] = [x, -dx];
  const atTop = nextY < 0;
  if (atTop) [nextY, dy] = [0, -dy];
  const meets = Boolean(!atTop && bricks[10 * nextY + nextX]);
  const breaks = meets && !inBrick;
  if (breaks) [bricks, nextY, dy] = [bricks.with(10 * nextY + nextX, 0), y, -dy];
  if (!meets && nextY === 9) {
    if (!bricks.includes(1)) bricks = BRICKS;
    over = x !== paddle && nextX !== paddle;
    if (!over) [nextY, dx, dy] = [y, x === paddle ? dx : -dx, -dy];
  }
  return { x: nextX, y: nextY, dx, dy, paddle, bricks, inBrick: meets, score: score + breaks, trail: 10 * y + x, over };
}

const BRICKS = Array.from({ length: 100 }, (_, i) => Number(i >= 10 && i < 40));

/** gymnax's environments: the first state, one step, whether the episode is over, and a drawing of 300 by 120. */
const ENVIRONMENTS = {
  "CartPole-v1": {
    limit: 500,
    start: () => [0, 0, 0, 0].map(() => uniform(-0.05, 0.05)),
    step: ([x, speed, angle, turn], action) => {
      const [sin, cos] = [Math.sin(angle), Math.cos(angle)];
      const push = ((action ? 10 : -10) + 0.05 * turn ** 2 * sin) / 1.1;
      const turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 * cos ** 2) / 1.1));
      const speeding = push - (0.05 * turning * cos) / 1.1;
      return [x + 0.02 * speed, speed + 0.02 * speeding, angle + 0.02 * turn, turn + 0.02 * turning];
    },
    over: ([x, , angle]) => Math.abs(x) > 2.4 || Math.abs(angle) > (12 * 2 * Math.PI) / 360,
    draw: ([x, , angle]) => [
      line("axis", [[30, 100], [270, 100]]),
      drawing("rect", { class: "delta", x: 130 + 50 * x, y: 85, width: 40, height: 15 }),
      line("curve", [[150 + 50 * x, 85], [150 + 50 * x + 70 * Math.sin(angle), 85 - 70 * Math.cos(angle)]]),
    ],
  },
  "MountainCar-v0": {
    limit: 200,
    start: () => [uniform(-0.6, -0.4), 0],
    step: ([x, speed], action) => {
      const faster = clamp(speed + (action - 1) * 0.001 - Math.cos(3 * x) * 0.0025, -0.07, 0.07);
      const next = clamp(x + faster, -1.2, 0.6);
      return [next, next === -1.2 && faster < 0 ? 0 : faster];
    },
    over: ([x, speed]) => x >= 0.5 && speed >= 0,
    draw: ([x]) => {
      const at = (x) => [10 + ((x + 1.2) / 1.8) * 280, 105 - 40 * (1 + Math.sin(3 * x))];
      const ground = Array.from({ length: 61 }, (_, i) => at(-1.2 + 0.03 * i));
      const [[cx, cy], [flag, top]] = [at(x), at(0.5)];
      return [
        line("axis", ground), line("end", [[flag, top], [flag, top - 20]]),
        drawing("circle", { cx, cy: cy - 6, r: 6 }),
      ];
    },
  },
  "Breakout-MinAtar": {
    limit: 1000,
    pause: 60,
    start: () => {
      const x = 9 * Math.round(Math.random());
      return { x, y: 3, dx: x ? -1 : 1, dy: 1, paddle: 4, bricks: BRICKS, inBrick: false, score: 0, trail: 30 + x, over: false };
    },
    step: breakout,
    over: ({ over }) => over,
    observe: ({ x, y, paddle, bricks, trail }) =>
      bricks.flatMap((brick, i) => [i === 90 + paddle, i === 10 * y + x, i === trail, brick].map(Number)),
    draw: ({ x, y, paddle, bricks }) => {
      const cell = (kind, x, y) => drawing("rect", { class: kind, x: 95 + 11 * x, y: 5 + 11 * y, width: 10, height: 10 });
      const ball = drawing("circle", { cx: 100 + 11 * x, cy: 10 + 11 * y, r: 5 });
      return [
        ...bricks.flatMap((brick, i) => (brick ? [cell("delta", i % 10, Math.floor(i / 10))] : [])),
        cell("advantage", paddle, 9), ball, line("axis", [[94, 4], [205, 4], [205, 116], [94, 116], [94, 4]]),
      ];
    },
  },
};

/** What plays recorded frames: where the body is, and the ends of its limbs relative to it, in centimeters. */
function recording(frames) {
  const [x, y] = [(x) => 150 + 0.5 * x, (z) => 110 - 0.5 * z];
  return {
    limit: frames.length - 1,
    pause: 50,
    start: () => 0,
    step: (time) => time + 1,
    over: () => false,
    draw: (time) => {
      const [place, ...ends] = frames[time];
      const posts = [0, 1, 2, 3, 4, 5, 6].map((i) => 100 * i - 300 - (((place % 100) + 100) % 100));
      const limbs = Array.from({ length: ends.length / 4 }, (_, i) => ends.slice(4 * i, 4 * i + 4));
      return [
        line("axis", [[0, y(0)], [300, y(0)]]),
        ...posts.map((post) => line("axis", [[x(post), y(0)], [x(post), y(-8)]])),
        ...limbs.map(([a, b, c, d]) => line("limb", [[x(a), y(b)], [x(c), y(d)]])),
      ];
    },
  };
}

/** An agent that plays, beside its learning curve; a slider chooses among its checkpoints. */
function startAgent(root, { env, steps, returns, policies, frames }) {
  let [played, state, time, timer] = [null, null, 0, null];
  const scene = drawing("svg", { role: "img", "aria-label": `${env}, as the policy plays it`, viewBox: "0 0 300 120" });
  const learned = drawing("svg", { role: "img", "aria-label": `Return of ${env} while training`, viewBox: "0 0 300 120" });
  const [clock, chosen] = [element("p"), element("output")];
  const slider = element("input", {
    type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": `checkpoint of ${env}`,
  });
  const play = element("button", { type: "button", onclick: () => (timer ? stop() : begin()) }, "Play");
  const show = () => {
    scene.replaceChildren(...played.draw(state));
    const more = [state.score >= 0 ? `, score ${state.score}` : "", played.over(state) ? ", over" : ""].join("");
    clock.textContent = `${env}: step ${time} of at most ${played.limit}${more}.`;
  };
  const act = () => frames ? null : mode(perceptron(policies[slider.value], played.observe?.(state) ?? state));
  const advance = () => {
    if (played.over(state) || time === played.limit) [state, time] = [played.start(), 0];
    else [state, time] = [played.step(state, act()), time + 1];
    show();
  };
  const begin = () => ([timer, play.textContent] = [setInterval(advance, played.pause ?? 20), "Pause"]);
  const stop = () => ([timer, play.textContent] = [clearInterval(timer) ?? null, "Play"]);
  const [low, high] = [Math.min(...returns), Math.max(...returns)];
  const x = (share) => 10 + 280 * share;
  const choose = () => {
    const marked = x(steps[slider.value] / steps.at(-1));
    chosen.textContent = steps[slider.value].toLocaleString("en");
    learned.replaceChildren(
      line("curve", returns.map((y, i) => [x((i + 1) / returns.length), 100 - (85 * (y - low)) / (high - low)])),
      line("end", [[marked, 5], [marked, 105]]),
      words(10, 118, `return ${low} to ${high}`, "start"), words(290, 118, `${chosen.textContent} steps`, "end"),
    );
    played = frames ? recording(frames[slider.value]) : ENVIRONMENTS[env];
    [state, time] = [played.start(), 0];
    show();
  };
  slider.oninput = choose;
  choose();
  root.append(
    element("div", { className: "agent" }, scene, learned),
    element("label", {}, element("span", {}, "checkpoint, in steps"), slider, chosen), play, clock,
  );
}

// --- the gallery -----------------------------------------------------------------------------------------------------

/** A box that hides the rows of the page's tables in which not all of its words occur, and sections without rows. */
function startFilter(root) {
  const sections = [...document.querySelectorAll("article section section")].filter((each) => each.querySelector("tbody"));
  const rows = sections.flatMap((each) => [...each.querySelectorAll("tbody tr")]);
  const status = element("output");
  const show = () => {
    const sought = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !sought.every((word) => row.textContent.toLowerCase().includes(word));
    for (const each of sections) each.hidden = !each.querySelector("tbody tr:not([hidden])");
    status.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  const input = element("input", { type: "search", placeholder: "critic, ratio, 2024, ...", oninput: show });
  root.replaceChildren(element("label", {}, "Show rows with", input, status));
  show();
}

if (typeof document === "undefined") {
  module.exports = { chainError, learnerError, missingFields, pythonText, placeFor, clippedSurrogate, gae, sequence };
} else {
  const starts = { explorer: (root) => startExplorer(root, explorerTable), clip: startClip, gae: startGae, filter: startFilter };
  starts.agents = (root) => agentsTable.forEach((agent) => startAgent(root, agent));
  for (const [id, start] of Object.entries(starts)) {
    const root = document.getElementById(`interactive-${id}`);
    if (root) start(root);
  }
}
