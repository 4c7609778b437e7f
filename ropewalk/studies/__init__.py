"""Commands that measure or explain a model, a machine or a server; `server` imports none."""
