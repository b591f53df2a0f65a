"""MLflow as a sink of journals: what a journal comes to there (`form`), how it is brought (`deliver`), and
how that is done beside a study that runs (`beside`). The journal is the truth, and the queue of what is still
to be brought."""
