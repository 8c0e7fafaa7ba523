"""`baton bench quality`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks import quality as quality_bench
from benchmarks.quality import BASE_DTYPES, VARIANTS, Quality, QualityPlan
from engine.model_files.resolve import resolve_model


def quality(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub id or GGUF file.")],
    against: Annotated[
        str,
        typer.Option(
            help=f"Base to compare with: the same model in {', '.join(BASE_DTYPES)}, or another model's path."
        ),
    ] = "bf16",
    variants: Annotated[
        str,
        typer.Option(
            help=f"Variants to compare, from {', '.join(VARIANTS)}. Default: int8,int4,int8-kv; as-is "
            "where the base is another model."
        ),
    ] = "",
    text: Annotated[
        Path | None, typer.Option(help="Text to predict; default: generated conversations.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of the text.")] = 4096,
    context: Annotated[int, typer.Option(min=2, help="Tokens that are predicted from one beginning.")] = 512,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda or cuda:N.")] = "cpu",
    kernels: Annotated[str, typer.Option(help="Kernels, as in engine.kernels.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
    agreement_min: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with status 1 if top-1 agreement is below this.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure what quantisation costs in perplexity, top-1 agreement and KL divergence.

    Example: baton bench quality --model models/baton-demo --variants int8,int4,int8-kv
    """
    notes = Console(stderr=True, highlight=False)
    asked = ModelConfig(path=model, device=device)
    if against in BASE_DTYPES:
        asked = asked.model_copy(update={"dtype": BASE_DTYPES[against]})
        base, names = asked, variants or "int8,int4,int8-kv"
    else:
        base, names = ModelConfig(path=against, device=device), variants or "as-is"
    chosen = [(name, quality_bench.variant_model(name, asked)) for name in names.split(",")]
    plan = QualityPlan(tokens_max=tokens, context_tokens=context)
    engine = EngineConfig.model_validate({"kernels": kernels, "threads": threads})
    ids = quality_bench.text_tokens(resolve_model(base.path), text, tokens)
    results = quality_bench.measure(base, chosen, engine, ids, plan, notes.print)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        new_console().print(_table(results))
    worst = min(results, key=lambda result: result.top1_agreement)
    if worst.top1_agreement < agreement_min:
        raise SetupError(f"{worst.variant} agrees in {worst.top1_agreement:.2%} of positions only")


def _table(results: list[Quality]) -> Table:
    table = Table(title=f"Quality over {results[0].token_count} tokens")
    for column in ("variant", "perplexity", "ratio", "top-1 agreement", "KL mean", "KL p99"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for r in results:
        table.add_row(
            r.variant,
            f"{r.perplexity:.4f}",
            f"{r.perplexity_ratio:.4f}",
            f"{r.top1_agreement:.2%}",
            f"{r.kl_mean_nats:.5f}",
            f"{r.kl_p99_nats:.5f}",
        )
    return table
