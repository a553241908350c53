"""`headwater model`: base models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Base models on this machine.")


@app.callback()
def model() -> None:
    """Base models on this machine."""


@app.command(name="import")
def import_(
    gguf: Annotated[Path, typer.Argument(help="A GGUF file: Llama, Qwen2 or Qwen3 family, of any quantisation.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to make; must not exist.")],
) -> None:
    """Make a model folder from a GGUF file: its exact weights in float32, its tokenizer and chat template."""
    from common.inference.gguf_import import import_gguf

    made = import_gguf(gguf, folder)
    d = made.dimensions
    print(f"{folder}: {d.layers} layers, {d.vocabulary} tokens, context {d.context_tokens}, digest {made.digest[:12]}")


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="A PEFT folder of a LoRA adapter, e.g. a version of the hub.")],
    folder: Annotated[Path, typer.Argument(help="The model folder to make; must not exist.")],
    model: Annotated[Path | None, typer.Option(help="Its base model's folder; default: the embedded model.")] = None,
) -> None:
    """Merge an adapter into its base model, and check by loading both that they compute the same."""
    from common.inference.model_folder import EMBEDDED, open_model
    from deploy.merge import merge as run

    difference = run(open_model(model or EMBEDDED), adapter, folder)
    print(f"{folder}: the same to {difference:.1e} of the largest logit")
