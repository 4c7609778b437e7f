"""`python -m benchmarks.kv_needles llama-server MODEL.gguf`: needles that llama.cpp finds.

The prompts are those of `ropewalk eval MODEL` with the same lengths and number of queries, token by
token, and an answer is right by the same rule. Each type of its cache gets a server of its own.
"""

import shlex
from pathlib import Path

import click
import httpx

from benchmarks.kv_disk_peer import running
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.server.corpus.haystack import Query
from ropewalk.studies.evaluation.plan import LengthOptions, make_plan
from ropewalk.studies.evaluation.texts import choose_haystacks, make_texts, read_documents

_MORE = 512  # of the server's context, beyond the longest prompt


def queries_of(model: Path, lengths: tuple[int, ...], num_queries: int) -> dict[int, list[Query]]:
    """Return the questions of `ropewalk eval` at each length."""
    checkpoint = load_checkpoint(model, device="cpu")
    options = LengthOptions(
        context_lens=lengths, methods=("none",), num_windows=0, num_queries=num_queries
    )
    plan, tokenizer = make_plan(options, checkpoint.native), checkpoint.tokenizer
    haystacks = choose_haystacks(
        make_texts(read_documents(options.texts), tokenizer, plan.longest), plan, tokenizer
    )
    return {
        length: [each for stack in haystacks for each in stack.queries(length, tokenizer)]
        for length in plan.context_lens
    }


def is_found(client: httpx.Client, query: Query) -> bool:
    """Ask one question."""
    body = {
        "prompt": list(query.prompt_ids), "n_predict": query.max_tokens, "temperature": 0,
        "stop": ["\n"], "cache_prompt": True,
    }  # fmt: skip
    answer = client.post("/completion", json=body).raise_for_status().json()
    return query.is_answered_by(answer["content"])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("server", type=click.Path(exists=True, path_type=Path))
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--lengths", default="2048,8192", show_default=True)
@click.option("--queries", default=16, show_default=True, help="At each length.")
@click.option("--types", default="f32,q8_0,q4_0", show_default=True, help="Of keys and values.")
@click.option("--flags", default="--threads 2", show_default=True, help="Of llama-server.")
def main(  # noqa: PLR0917
    server: Path, model: Path, lengths: str, queries: int, types: str, flags: str
) -> None:
    """Print how many needles are found with each type of cache."""
    asked = queries_of(model, tuple(map(int, lengths.split(","))), queries)
    click.echo(f"| cache | {' | '.join(f'{each} tokens' for each in asked)} |")
    click.echo("|---" * (1 + len(asked)) + "|")
    serve = [str(server), "--model", str(model), "--parallel", "1", "--flash-attn", "on"]
    serve += ["--ctx-size", str(max(asked) + _MORE), *shlex.split(flags)]
    for kind in types.split(","):
        cells = []
        with running([*serve, "--cache-type-k", kind, "--cache-type-v", kind]) as (client, _):
            for each in asked.values():
                found = sum(is_found(client, query) for query in each[:queries])
                cells.append(f"{found} of {queries}")
        click.echo(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
