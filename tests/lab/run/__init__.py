"""The runner: studies of emulated engines, from their file to their journal."""
