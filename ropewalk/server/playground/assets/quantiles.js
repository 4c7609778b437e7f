/** Quantiles of cumulative counts, as Prometheus' histogram_quantile computes them. */

/** Returns newer minus older counts; `older` null means since the server's start. */
export function difference(newer, older) {
  return older === null ? newer : newer.map((count, at) => count - older[at]);
}

/**
 * Returns the value that a share `q` of the observations does not exceed, or null without any.
 *
 * `counts` are cumulative, one for each of `bounds` and a last one for all observations.
 * Source: Prometheus, "histogram_quantile()", linear interpolation inside a bucket.
 */
export function quantile(q, bounds, counts) {
  const total = counts[counts.length - 1];
  if (total <= 0) {
    return null;
  }
  const rank = q * total;
  const at = counts.findIndex((count) => count >= rank);
  if (at >= bounds.length) {
    return bounds[bounds.length - 1];
  }
  const lower = at === 0 ? 0 : bounds[at - 1];
  const before = at === 0 ? 0 : counts[at - 1];
  const inside = counts[at] - before;
  if (inside === 0) {
    return bounds[at];
  }
  return lower + (bounds[at] - lower) * ((rank - before) / inside);
}
