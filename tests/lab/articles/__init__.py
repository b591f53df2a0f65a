"""Five published articles, counted by a person: see README.md for what counts as derived."""
