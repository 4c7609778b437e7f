"""`python -m benchmarks.models KIND`: write a model with random weights, to measure with."""

import click

from benchmarks.models import gguf_hybrid, gguf_llama, gguf_mixture, llama

main = click.Group(
    "benchmarks.models",
    {
        "llama": llama.main,
        "gguf-llama": gguf_llama.main,
        "gguf-hybrid": gguf_hybrid.main,
        "gguf-mixture": gguf_mixture.main,
    },
    help=__doc__,
)

if __name__ == "__main__":
    main()
