"""MLflow as a sink of journals."""
