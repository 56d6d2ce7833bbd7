"""What the daily scripts share: the few options that they write otherwise than `hf-grow finetune`, which they run."""

import argparse
from collections.abc import Sequence

from hf_grow.cli import main


def finetune_script(
    description: str, words: Sequence[str], defaults: Sequence[str], *, model: str | None = None, grow_at: int = 0
) -> None:
    """Run `hf-grow finetune` with a script's defaults and the words that it was given, which count for more.

    With method full the model grows at `grow_at` unless told otherwise; with others only what is new is saved.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All options of `hf-grow finetune` can be given too: see hf-grow finetune --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=model, required=model is None, help="a Hub id or a local folder")
    parser.add_argument("--method", default="full", help="full, grow, lora or grow+lora")
    parser.add_argument("--budget", help="new parameters, or a percentage of the model's; 1%% without --columns")
    parser.add_argument("--columns", help="instead of the budget: query/key columns for every head")
    parser.add_argument("--grow-at", nargs="*", default=[str(grow_at)], help="steps at which to grow, with method full")
    parser.add_argument("--every", default="100", help="steps between evaluations and checkpoints")
    own, others = parser.parse_known_args(words)
    given = {"--budget": own.budget if own.budget or own.columns else "1%", "--columns": own.columns}
    amount = [word for option, value in given.items() if value is not None for word in (option, value)]
    if own.method != "full":
        how = [*amount, "--growth-only"]
    else:
        how = [*amount, "--grow-at", ",".join(own.grow_at)] if own.grow_at else []
    every = ["--eval-every", own.every, "--save-every", own.every]
    try:
        main(["finetune", own.model, "--method", own.method, *every, *how, *defaults, *others])
    except SystemExit as ended:
        # Whoever runs the script inside another program goes on after it.
        if ended.code:
            raise
