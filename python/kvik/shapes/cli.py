"""``kvik shapes``: what models' KV comes to."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik.shapes.errors import ShapeError
from kvik.shapes.model import ModelShape
from kvik.shapes.presets import PRESETS

_TABLE_WIDTH = 110  # narrower terminals wrap lines and lose no digit


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Ranks that share the heads; what is shown is one rank's part.",
)
@click.option(
    "--page-tokens",
    type=click.IntRange(1, 65536),
    default=16,
    show_default=True,
    help="Tokens of a page; vLLM's own choice on a GPU is 16.",
)
@click.option("--dtype", metavar="TYPE", help="Element type of the KV, instead of the model's own.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def shapes(models: tuple[str, ...], tp: int, page_tokens: int, dtype: str | None, as_json: bool) -> None:
    """Show how many bytes of KV models have: a token, a page, a whole context.

    MODEL is a preset's name, the path of a config.json or of its folder, or
    layers=N,kv_heads=N,head_size=N; all presets without one.
    """
    rows: list[dict[str, Any]] = []
    cannot: list[str] = []
    for text in models or PRESETS:
        try:
            rows.append(_row(ModelShape.resolve(text, dtype=dtype), tp, page_tokens))
        except ShapeError as error:
            if models:
                raise click.UsageError(str(error)) from error
            cannot.append(str(error))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print(rows)
    for reason in cannot:
        click.echo(f"Left out: {reason}", err=as_json)


def _row(shape: ModelShape, tp: int, page_tokens: int) -> dict[str, Any]:
    layout = shape.of_rank(page_tokens, tp)
    return {
        "model": shape.name,
        "attention": shape.attention,
        "layers": shape.layers,
        "tp": tp,
        "heads": len(layout.heads),
        "content": shape.content,
        "dtype": shape.dtype,
        "token_bytes": shape.kv_bytes_per_token(tp),
        "page_tokens": page_tokens,
        "page_bytes": layout.page_bytes,
        "max_context": shape.max_context,
        "context_bytes": shape.max_context * shape.kv_bytes_per_token(tp),
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    console = Console(soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    if rows:
        first = rows[0]
        ranks = "" if first["tp"] == 1 else f", one of {first['tp']} ranks"
        title = f"KV in bytes, pages of {first['page_tokens']} tokens{ranks}"
        grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        grid.add_column("model", no_wrap=True)
        for heading in ("layers", "heads", "elements", "dtype", "a token", "a page", "context", "GiB"):
            grid.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            grid.add_row(
                escape(row["model"]),
                str(row["layers"]),
                "latent" if row["attention"] == "mla" else str(row["heads"]),
                str(row["content"]),
                row["dtype"],
                f"{row['token_bytes']:,}",
                f"{row['page_bytes']:,}",
                f"{row['max_context']:,}",
                f"{row['context_bytes'] / 2**30:.2f}",
            )
        console.print(grid)
