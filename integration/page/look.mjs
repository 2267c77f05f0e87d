// Drives headless Chromium over its debugging protocol (no packages needed) and looks at the page.
// Arguments: URL, directory for screenshots, scratch directory, names that must be seen.
import { spawn } from "node:child_process";
import { writeFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const [url, out, scratch, ...names] = process.argv.slice(2);
const chromium = spawn("chromium", [
  "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--hide-scrollbars", `--user-data-dir=${scratch}/profile`,
  "--remote-debugging-pipe", "about:blank",
], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
process.on("exit", () => chromium.kill("SIGKILL"));
let closing = false;
const ended = new Promise((done) => chromium.on("exit", (code) => {
  if (!closing) { console.error(`chromium ended (${code})`); process.exit(1); }
  done();
}));

async function until(what, test, seconds = 20) {
  let last = "";
  for (let i = 0; i < seconds * 10; i++) {
    try {
      const value = await test();
      if (value) return value;
    } catch (error) {
      // A document that is just being replaced cannot be asked; the next one can.
      last = `: ${error.message}`;
    }
    await sleep(100);
  }
  throw new Error(`waited ${seconds} s in vain for ${what}${last}`);
}

// Messages over descriptors 3 (to the browser) and 4 (from it), each closed by a zero byte.
let number = 0;
let session;
const waiting = new Map();
const faults = [];
const foreign = [];
function take(message) {
  if (message.id) return waiting.get(message.id)?.(message);
  const p = message.params;
  if (message.method === "Runtime.exceptionThrown") faults.push(p.exceptionDetails.exception?.description ?? p.exceptionDetails.text);
  if (message.method === "Runtime.consoleAPICalled" && p.type === "error") faults.push(JSON.stringify(p.args));
  if (message.method === "Log.entryAdded" && p.entry.level === "error") faults.push(p.entry.text);
  if (message.method === "Network.requestWillBeSent" && !p.request.url.startsWith(url) && !p.request.url.startsWith("data:"))
    foreign.push(p.request.url);
}
let rest = Buffer.alloc(0);
chromium.stdio[4].on("data", (data) => {
  rest = Buffer.concat([rest, data]);
  for (let end; (end = rest.indexOf(0)) >= 0; rest = rest.subarray(end + 1)) take(JSON.parse(rest.subarray(0, end).toString()));
});
const send = (method, params = {}) => new Promise((done, failed) => {
  const id = ++number;
  waiting.set(id, (m) => (m.error ? failed(new Error(`${method}: ${m.error.message}`)) : done(m.result)));
  chromium.stdio[3].write(JSON.stringify({ id, method, params, sessionId: session }) + "\0");
});
const page = await until("a page of chromium", async () =>
  (await send("Target.getTargets")).targetInfos.find((t) => t.type === "page"));
session = (await send("Target.attachToTarget", { targetId: page.targetId, flatten: true })).sessionId;
const evaluate = async (expression) => {
  const { result, exceptionDetails } = await send("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
  if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.text}`);
  return result.value;
};
for (const domain of ["Page", "Runtime", "Log", "Network"]) await send(`${domain}.enable`);

let bad = 0;
const check = (holds, what) => {
  console.log(`${holds ? "ok  " : "FAIL"} ${what}`);
  if (!holds) bad++;
};

for (const [name, width, height, scheme] of [
  ["desktop", 1280, 900, "light"], ["desktop-dark", 1280, 900, "dark"], ["phone", 360, 740, "light"], ["phone-dark", 360, 740, "dark"],
]) {
  const mobile = width < 600;
  await send("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: mobile ? 2 : 1, mobile });
  await send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
  await send("Page.navigate", { url: "about:blank" });
  await send("Page.navigate", { url });
  await until("the page to be drawn", () => evaluate(`location.href !== "about:blank" && document.readyState === "complete" && document.body.dataset.state === "shown"`));
  const text = await evaluate("document.body.textContent");
  for (const wanted of names) check(text.includes(wanted), `${name}: ${wanted} is seen`);
  const bars = await evaluate(`document.querySelectorAll(".bar").length`);
  const pieces = await evaluate(`document.querySelectorAll(".piece").length`);
  check(bars > 0, `${name}: ${bars} bars and ${pieces} branches are drawn`);
  const sizes = await evaluate(`[...document.querySelectorAll(".bar")].every((b) =>
    [...b.children].reduce((n, c) => n + c.getBoundingClientRect().width, 0) <= b.getBoundingClientRect().width + b.children.length + 1)`);
  check(sizes, `${name}: no bar is longer than its disk`);
  const wide = await evaluate("document.documentElement.scrollWidth");
  check(wide <= width, `${name}: nothing is wider than the screen (${wide} of ${width})`);
  check(await evaluate(`document.title.endsWith("Union CSI") && !document.querySelector("main img")`), `${name}: no name became markup`);
  check(await evaluate(`[...document.querySelectorAll("button")].every((b) => (b.getAttribute("aria-label") || b.textContent).trim())`),
    `${name}: every button has a name for a screen reader`);
  // Open the first volume by keyboard, as somebody without a mouse would.
  if (await evaluate(`!!document.querySelector(".volume")`)) {
    await evaluate(`document.querySelector(".volume").focus()`);
    await send("Input.dispatchKeyEvent", { type: "keyDown", key: "Enter", code: "Enter", windowsVirtualKeyCode: 13, text: "\r" });
    await send("Input.dispatchKeyEvent", { type: "keyUp", key: "Enter", code: "Enter", windowsVirtualKeyCode: 13 });
    check(await until("details", () => evaluate(`!!document.querySelector(".detail dl, .detail table")`), 3).catch(() => false),
      `${name}: a volume opens by keyboard`);
    const after = await evaluate("document.documentElement.scrollWidth");
    check(after <= width, `${name}: nothing is wider than the screen with details open (${after} of ${width})`);
    await evaluate("document.activeElement.blur()");
  }
  const tall = await evaluate("document.documentElement.scrollHeight");
  const { data } = await send("Page.captureScreenshot", {
    captureBeyondViewport: true, clip: { x: 0, y: 0, width, height: Math.min(Math.max(tall, 400), 4000), scale: 1 },
  });
  writeFileSync(`${out}/${name}.png`, Buffer.from(data, "base64"));
}
// The tip of a branch, as a pointer sees it.
await send("Emulation.setDeviceMetricsOverride", { width: 1280, height: 900, deviceScaleFactor: 1, mobile: false });
if (await evaluate(`!!document.querySelector(".piece")`)) {
  await evaluate("scrollTo(0, 0)");
  // Asked again until it holds: the layout follows the change of size a moment later.
  const told = await until("the tip of a branch", async () => {
    const [x, y] = await evaluate(`(() => { const r = document.querySelector(".piece").getBoundingClientRect();
      return [r.left + r.width / 2, r.top + r.height / 2]; })()`);
    await send("Input.dispatchMouseEvent", { type: "mouseMoved", x: 1, y: 1 });
    await send("Input.dispatchMouseEvent", { type: "mouseMoved", x, y });
    return evaluate(`!document.getElementById("tip").hidden && document.getElementById("tip").textContent.length > 10`);
  }, 3).catch(() => false);
  check(told, "a branch tells what it is under the pointer");
  const { data } = await send("Page.captureScreenshot", {});
  writeFileSync(`${out}/pointer.png`, Buffer.from(data, "base64"));
}
check(faults.length === 0, `no errors in the console ${faults.join("; ")}`);
check(foreign.length === 0, `nothing is asked of anywhere else ${foreign.join(" ")}`);
// Closed in peace, so that none of its processes writes into the profile while that is removed.
closing = true;
session = undefined;
send("Browser.close").catch(() => {});
await Promise.race([ended, sleep(5000)]);
process.exit(bad ? 1 : 0);
