"""The mutation score of the audit: numbers that a person marked as derivable, changed one at a time."""
