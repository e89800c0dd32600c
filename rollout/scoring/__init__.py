"""`rollout score`: recorded sequences under other weights and policies (docs/scoring.md)."""
