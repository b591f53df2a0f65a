"""`python -m tests.lab.corpus`: the score of the audit on the corpus."""

import sys

import click

from tests.lab.corpus.roster import corpus
from tests.lab.corpus.score import score


@click.command()
@click.option("--seed", default=6, show_default=True, help="Seed of the corpus that the tests use.")
@click.option("--seeds", default=1, show_default=True, help="How many corpora, from that seed on.")
@click.option("--show", is_flag=True, help="Also print each miss and each false alarm.")
@click.option("--text", help="Print the spoiled document of this name instead.")
def main(seed: int, seeds: int, show: bool, text: str | None) -> None:
    """Score the audit."""
    cases = [case for at in range(seed, seed + seeds) for case in corpus(at)]
    if text is not None:
        sys.stdout.write(next(case.injected.text for case in cases if case.name == text))
        return
    result = score(cases)
    for line in result.lines():
        click.echo(line)
    if show:
        for line in result.missed():
            click.echo(line)


if __name__ == "__main__":
    main()
