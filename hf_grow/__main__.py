"""`python -m hf_grow` is the `hf-grow` command."""

from hf_grow.cli import main

main()
