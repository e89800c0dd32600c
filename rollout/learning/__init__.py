"""Learning from trajectories: advantages, losses, the learner and its loop."""
