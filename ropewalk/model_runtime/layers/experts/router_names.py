"""The names of routers: linears that choose the experts of a token, in transformers' models."""

_NAMES = {"gate", "router"}


def is_router(name: str) -> bool:
    """Return whether a module of this name is a router, such as `mlp.gate` or `router.proj`.

    An error there is not a small one, so routers are neither quantised nor rounded.
    """
    return not _NAMES.isdisjoint(name.split(".")[-2:])
