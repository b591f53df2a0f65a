"""MLflow as a sink of journals: what a journal comes to there (`form`), and how it is brought (`deliver`). The
journal is the truth, and the queue of what is still to be brought."""
