"""`hf-grow push`: upload a grown checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from hf_grow.cli.options import AsJson
from hf_grow.cli.output import console, print_json
from hf_grow.saving.checkpoint import push_grown


def push(
    folder: Annotated[Path, typer.Argument(help="A folder written by hf-grow.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, user/name.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="For a new repository.")] = None,
    token: Annotated[str | None, typer.Option(help="Access token; default: the one you logged in with.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "Upload grown model",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a grown checkpoint, or growth alone, to the Hub in one commit."""
    address = push_grown(
        folder, repo, private=private, token=token, revision=revision, commit_message=message, create_pr=create_pr
    )
    if as_json:
        print_json({"repository": repo, "commit": address})
    else:
        console.print(f"pushed to {address}", soft_wrap=True)
