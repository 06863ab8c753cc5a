"""The only place that knows a checkpoint: what its files hold, and how its layers compute."""
