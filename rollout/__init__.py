"""What a run means: prompts, rewards, trajectory records, files, the driver and the command line."""
