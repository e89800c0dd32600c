"""`rollout report`: a run's folder as one page that needs nothing else, and its figures as PNGs (docs/report.md)."""
