/** The server: its served names, and its counts every two seconds. */

import { getJson } from "./api.js";
import { drawChart, noteStats } from "./chart.js";
import { byId, make } from "./dom.js";
import { enable, fail, model, state } from "./state.js";

const POLL_MS = 2000;

let isPolling = false;

/**
 * Waits until the model is loaded, then fills the controls. Only then can a prompt be sent.
 *
 * `onModel` is called when the served name is chosen.
 */
export async function connect(onModel) {
  for (;;) {
    try {
      await getJson("ready");
      const listed = (await getJson("v1/models")).data;
      state.models = listed.filter((each) => each.root === each.id); // without aliases
      break;
    } catch (error) {
      const { phase, bytes_done: done, bytes_total: total } = error.error ?? {};
      const share = total ? `, ${Math.floor((100 * done) / total)} %` : "";
      byId("server-state").textContent = phase ? `loading: ${phase}${share}` : error.message;
      if (error.status === 401) {
        byId("server-state").textContent = "needs a key";
        fail(error);
        return; // until a key is typed
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  byId("alert").textContent = "";
  byId("model").replaceChildren(...state.models.map((each) => make("option", {}, each.id)));
  fillForModel();
  onModel();
  enable();
  byId("server-state").textContent = "ready";
  if (!isPolling) {
    isPolling = true;
    poll();
  }
}

/** Fills the choices that depend on the model. */
export function fillForModel() {
  const types = model().ropewalk?.allowed_rope_types ?? [];
  const option = (value, label) => make("option", { value }, label);
  byId("rope-type").replaceChildren(option("", "as deployed"), ...types.map((each) => option(each, each)));
  byId("compare-with").replaceChildren(
    option(JSON.stringify({ rope: { rope_type: "default" } }), "no scaling"),
    ...types
      .filter((each) => each !== "default")
      .map((each) => option(JSON.stringify({ rope: { rope_type: each } }), each)),
    ...state.models
      .filter((each) => each !== model())
      .map((each) => option(JSON.stringify({ model: each.id, rope: null }), each.id)),
  );
  byId("needle-len").value = model().max_model_len - 16;
}

/** Writes bytes in GiB, or in MiB below one. */
function sizeText(bytes) {
  const gib = bytes / 2 ** 30;
  return gib < 1 ? `${(1024 * gib).toFixed(0)} MiB` : `${gib.toFixed(2)} GiB`;
}

/** Names the format of a cache in other numbers than the model's. */
function cacheFormat() {
  const format = model()?.ropewalk?.kv_cache_dtype ?? "auto";
  return format === "auto" ? "" : ` in ${format}`;
}

/** Draws the server's counts while the page is visible. */
async function poll() {
  if (!document.hidden) {
    try {
      const stats = await getJson("stats");
      noteStats(stats);
      const used = (100 * stats.kv_cache_usage_ratio).toFixed(0);
      byId("load").textContent =
        `queue ${stats.requests_waiting} · running ${stats.requests_running} · ` +
        `cache ${used} % of ${sizeText(stats.kv_cache_bytes)}${cacheFormat()}`;
      drawChart();
    } catch (error) {
      byId("load").textContent = error.status === 401 ? "" : error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}
